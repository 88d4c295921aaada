"""A client's script; the line marked with <- is margin control (Eq. 3)."""

import nvflare.client as flare
import torch
from model import Net
from nvflare.apis.dxo import MetaKey
from sklearn.datasets import load_digits

from fedld.local import OBJECTIVES

flare.init()
part = int(flare.get_site_name().removeprefix("site-")) - 1
data = load_digits()
images, labels = torch.tensor(data.data[part::3] / 16).float(), torch.tensor(data.target[part::3])
criterion = OBJECTIVES["marg-log"]  # <- instead of torch.nn.CrossEntropyLoss()

while flare.is_running():
    received = flare.receive()
    model = Net()
    model.load_state_dict(received.params)
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimiser.zero_grad()
        criterion(model(images), labels).backward()
        optimiser.step()
    print(f"{flare.get_site_name()}: accuracy of the global model {accuracy:.3f}", flush=True)
    flare.send(
        flare.FLModel(
            params=model.state_dict(),
            metrics={"accuracy": accuracy},
            meta={MetaKey.NUM_STEPS_CURRENT_ROUND: len(labels)},
        )
    )
