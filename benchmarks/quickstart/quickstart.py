"""FedAvg as Flower's own PyTorch quickstart does it: train, evaluate at the clients, Flower's strategy."""

import time

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader, TensorDataset

from fedld.models import build

server = ServerApp()
client = ClientApp()


def make_model():
    return build("cnn", classes=2, channels=3, image_size=32, seed=0)


def load(context):
    torch.set_num_threads(1)
    data = np.load(context.node_config["data"])
    images = torch.tensor(data["images"]).permute(0, 3, 1, 2).float().div(255).sub(0.5).div(0.25)
    return TensorDataset(images, torch.tensor(data["labels"]))


@client.train()
def train(message, context):
    model, data = make_model(), load(context)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    criterion, optimiser = (
        torch.nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), 0.02, momentum=0.9),
    )
    for images, labels in DataLoader(data, batch_size=50, shuffle=True):
        optimiser.zero_grad()
        criterion(model(images), labels).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": len(data)})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
    )


@client.evaluate()
def evaluate(message, context):
    model, data = make_model(), load(context)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = 0.0
    with torch.no_grad():
        for images, labels in DataLoader(data, batch_size=50):
            loss += torch.nn.functional.cross_entropy(model(images), labels, reduction="sum").item()
    metrics = MetricRecord({"num-examples": len(data), "loss": loss / len(data)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@server.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < 3:
        time.sleep(0.5)
    evaluate, rounds = context.run_config["evaluate"], context.run_config["rounds"]
    strategy = FedAvg(min_available_nodes=3, fraction_evaluate=evaluate)
    start = time.perf_counter()
    strategy.start(grid, ArrayRecord(make_model().state_dict()), rounds)
    print(f"seconds a round: {(time.perf_counter() - start) / rounds:.2f}", flush=True)
