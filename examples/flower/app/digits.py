"""An ordinary Flower app; the two lines marked with <- are all that fedld asks of it."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from sklearn.datasets import load_digits

from fedld.flower import MarginControl, PrincipalStrategy

server = ServerApp()
client = ClientApp()


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


@client.train()
def train(message, context):
    model, data, part = make_model(), load_digits(), context.node_config["part"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = torch.tensor(data.data[part::3] / 16).float(), torch.tensor(data.target[part::3])
    criterion = MarginControl("marg-log", lam=0.01)  # <-
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimiser.zero_grad()
        criterion(model(images), labels).backward()
        optimiser.step()
    metrics, who = MetricRecord({"num-examples": len(labels)}), ConfigRecord({"site": f"part {part}"})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics, "who": who}), reply_to=message)


@server.main()
def main(grid, context):
    strategy = PrincipalStrategy(min_available_nodes=3, fraction_evaluate=0.0)  # <-
    strategy.start(grid, ArrayRecord(make_model().state_dict()), context.run_config["rounds"])
    print(*strategy.clients, sep="\n", flush=True)
