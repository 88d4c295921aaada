"""The job in Flower's simulation engine (Ray), like its quickstart: `python flower_job.py FILE.npz`."""

import sys

import torch
import torch.nn.functional as F
from common import BATCH, CLIENTS, LR, MOMENTUM, ROUNDS, load, network
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

PATH = sys.argv[1]
client, server = ClientApp(), ServerApp()


@client.train()
def train(message, context):
    torch.set_num_threads(1)
    (x, y), model = load(PATH)[0][context.node_config["partition-id"]], network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    model.train()
    for chosen in torch.randperm(len(x)).split(BATCH):
        optimiser.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimiser.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(content=RecordDict(content), reply_to=message)


def evaluate(server_round, arrays):
    (x, y), model = load(PATH)[1], network()
    model.load_state_dict(arrays.to_torch_state_dict())
    model.eval()
    with torch.no_grad():
        right = sum(
            (model(a).argmax(1) == b).sum().item() for a, b in zip(x.split(256), y.split(256), strict=True)
        )
    return MetricRecord({"accuracy": right / len(x)})


@server.main()
def main(grid, context):
    strategy = FedAvg(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS
    )
    arrays = ArrayRecord(network().state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS, evaluate_fn=evaluate)


if __name__ == "__main__":
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=CLIENTS, backend_config=backend)
