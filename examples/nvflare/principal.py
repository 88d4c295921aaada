"""Principal-gradient aggregation (and every other rule of fedld) as an NVIDIA FLARE aggregator."""

import torch
from nvflare.apis.dxo import MetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from fedld.aggregation import aggregate


class PrincipalAggregator(ModelAggregator):
    """Combines the clients' differences (TransferType.DIFF); weights are their numbers of samples."""

    def __init__(self, rule: str = "principal", min_clients: int = 2) -> None:
        super().__init__()
        self.rule, self.min_clients = rule, min_clients
        self.reset_stats()

    def reset_stats(self) -> None:
        self.updates, self.sizes, self.names = [], [], []

    def accept_model(self, model: FLModel) -> None:
        assert model.params_type == ParamsType.DIFF, (
            "send differences: params_transfer_type=TransferType.DIFF"
        )
        self.updates.append({name: torch.as_tensor(value) for name, value in model.params.items()})
        self.sizes.append(model.meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND, 1))
        self.names.append(str(model.meta.get("client_name", len(self.names))))

    def aggregate_model(self) -> FLModel:
        result = aggregate(
            self.updates, self.sizes, self.rule, clients=self.names, min_clients=self.min_clients
        )
        self.info(f"fedld: cosines with the aggregate {result.report.cosines}")
        update = {name: value.numpy() for name, value in result.update.items()}
        return FLModel(params=update, params_type=ParamsType.DIFF)
