"""The job in FedLab's standalone pipeline: `python fedlab_job.py FILE.npz`."""

import sys
from unittest.mock import MagicMock

import torch
from common import BATCH, CLIENTS, LR, MOMENTUM, ROUNDS, load, network

# FedLab's package imports torchvision for datasets that this job does not use.
sys.modules["torchvision"] = MagicMock()
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from torch.utils.data import DataLoader, TensorDataset


class Shards:
    def __init__(self, shards):
        self.sets = [TensorDataset(*shard) for shard in shards]

    def get_dataloader(self, client, batch_size):
        return DataLoader(self.sets[client], batch_size, shuffle=True)


class Pipeline(StandalonePipeline):
    """FedLab's pipeline with an evaluation after every round."""

    def main(self):
        while self.handler.if_stop is False:
            self.trainer.local_process(self.handler.downlink_package, self.handler.sample_clients())
            for package in self.trainer.uplink_package:
                self.handler.load(package)
            self.evaluate()

    def evaluate(self):
        model = self.handler.model.eval()
        with torch.no_grad():
            for x in self.test.split(256):
                model(x).argmax(1)
        model.train()


def main(path):
    shards, test = load(path)
    model = network()
    handler = SyncServerHandler(model, global_round=ROUNDS, sample_ratio=1.0)
    trainer = SGDSerialClientTrainer(model, num_clients=CLIENTS)
    trainer.setup_dataset(Shards(shards))
    trainer.setup_optim(1, BATCH, LR)
    trainer.optimizer = torch.optim.SGD(trainer._model.parameters(), lr=LR, momentum=MOMENTUM)
    handler.num_clients = CLIENTS
    pipeline = Pipeline(handler, trainer)
    pipeline.test = test[0]
    pipeline.main()


if __name__ == "__main__":
    main(sys.argv[1])
