"""Run the example in NVIDIA FLARE's simulator: python examples/nvflare/job.py"""

import os
from pathlib import Path

from model import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv
from principal import PrincipalAggregator

os.chdir(Path(__file__).parent)
recipe = FedAvgRecipe(
    name="principal",
    model=Net(),
    min_clients=3,
    num_rounds=3,
    train_script="train.py",
    aggregator=PrincipalAggregator(),
    params_transfer_type=TransferType.DIFF,
)
run = recipe.execute(SimEnv(num_clients=3, workspace_root="/tmp/fedld-nvflare"))
print("result:", run.get_result())
