"""Lesions on simulated photographs of eyes from three sites: Dice of every site, and masks of new pictures.

Run it: python examples/segmentation.py
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import fedld
from fedld.engine.ensemble import load_predictor


def main(rounds: int = 15, samples: int = 600) -> dict[str, float]:
    """Train a U-Net with FedBN, print each site's Dice with its interval, and predict a mask."""
    found = {}
    with TemporaryDirectory() as folder:
        result = fedld.run(
            "fedbn",
            "fundus-sim",
            task="segmentation",
            clients=3,
            model="unet:norm=batch",
            lr=0.3,
            rounds=rounds,
            batch_size=16,
            data={"samples": samples},
            workers=0,
            out=Path(folder) / "run",
        )
        print(result)
        summary = json.loads((result.path / "summary.json").read_text())
        for site, models in summary["cases"].items():
            for model, means in models.items():
                dice = means["measures"]["dice"]
                found[f"{site}, {model}"] = dice["value"]
                print(f"{site}, {model}: Dice {dice['value']:.3f} [{dice['low']:.3f}, {dice['high']:.3f}]")
        predictor = load_predictor(result.path)
        channels, height, width = predictor.facts.input_shape
        pictures = np.zeros((1, height, width, channels), np.uint8)
        print(predictor.columns(pictures))
    return found


if __name__ == "__main__":
    main()
