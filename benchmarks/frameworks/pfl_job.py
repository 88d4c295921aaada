"""The job in pfl-research's simulated backend: `python pfl_job.py FILE.npz`."""

import sys

import torch
import torch.nn.functional as F
from common import BATCH, CLIENTS, LR, MOMENTUM, ROUNDS, load, network
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import (
    FederatedNNAlgorithm,  # noqa: F401  (the algorithm's base, for readers)
    NNAlgorithmParams,
)
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel


def with_metrics(model):
    """pfl asks the network for its loss and metrics."""

    def loss(inputs, targets, eval=False):
        model.train(not eval)
        return F.cross_entropy(model(inputs), targets)

    @torch.no_grad()
    def metrics(inputs, targets, eval=False):
        model.train(not eval)
        logits = model(inputs)
        right = (logits.argmax(1) == targets).sum().item()
        return {
            "loss": Weighted(F.cross_entropy(logits, targets, reduction="sum").item(), len(targets)),
            "accuracy": Weighted(right, len(targets)),
        }

    model.loss, model.metrics = loss, metrics
    return model


def main(path):
    shards, test = load(path)
    sampler = get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    training = FederatedDataset(lambda user: Dataset(raw_data=list(shards[user]), user_id=str(user)), sampler)
    network_ = with_metrics(network())
    optimiser = torch.optim.SGD(network_.parameters(), lr=1.0)
    model = PyTorchModel(
        network_,
        local_optimizer_create=lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=MOMENTUM),
        central_optimizer=optimiser,
    )
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH)
    params = NNAlgorithmParams(
        central_num_iterations=ROUNDS,
        evaluation_frequency=ROUNDS,  # on the clients: only in the first round
        train_cohort_size=CLIENTS,
        val_cohort_size=0,
    )
    backend = SimulatedBackend(training_data=training, val_data=training)
    callback = CentralEvaluationCallback(
        Dataset(raw_data=list(test)), model_eval_params=NNEvalHyperParams(local_batch_size=256), frequency=1
    )
    FederatedAveraging().run(
        params, backend, model, local, NNEvalHyperParams(local_batch_size=256), [callback]
    )


if __name__ == "__main__":
    main(sys.argv[1])
