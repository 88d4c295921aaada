"""Four tasks on a small table of patients: a class, two labels, a number and a survival time.

Run it: python examples/tasks.py
"""

import csv
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import fedld

HOSPITALS = ("delhi", "oslo", "lima")
TARGETS = {
    "classification": ("sick", "frail,time,event,value"),
    "multilabel": ("sick,frail", "time,event,value"),
    "regression": ("value", "frail,time,event,sick"),
    "survival": ("time,event", "sick,frail,value"),
}


def write_patients(file: Path, count: int = 240) -> None:
    """Write patients of three hospitals; some doses are missing, and Lima does not know who is frail."""
    rng = np.random.default_rng(0)
    with file.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["patient", "hospital", "age", "dose", "sick", "frail", "value", "time", "event"])
        for k in range(count):
            age, dose = rng.normal(60, 10), rng.normal()
            risk = (age - 60) / 20 + dose
            sick, value = int(risk + 0.3 * rng.normal() > 0), 20 + 3 * risk + rng.normal()
            time, event = rng.exponential(np.exp(-risk)), int(rng.random() < 0.7)
            cell = "" if k % 10 == 0 else f"{dose:.3f}"
            frail = "" if HOSPITALS[k % 3] == "lima" else int(age > 65)
            person = [k, HOSPITALS[k % 3], f"{age:.1f}", cell]
            table.writerow([*person, sick, frail, f"{value:.2f}", f"{time:.4f}", event])


def main(rounds: int = 15) -> dict[str, fedld.Result]:
    """Train FedAvg for every task."""
    results = {}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "patients.csv"
        write_patients(file)
        for task, (target, drop) in TARGETS.items():
            results[task] = fedld.run(
                "fedavg",
                f"csv:{file}",
                task=task,
                target_column=target,
                site_column="hospital",
                data={"drop": drop},
                model="linear",
                lr=0.1,
                rounds=rounds,
                decompose=rounds,
                workers=0,
            )
            print(results[task], results[task].decomposition[-1], sep="\n")
    return results


if __name__ == "__main__":
    main()
