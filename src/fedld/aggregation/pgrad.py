"""`pgrad`: principal gradients after Wang et al. 2023, with the clients' updates as trajectory."""

from dataclasses import dataclass

import numpy as np

from fedld.aggregation.rule import NO_EXTRAS, Array, Extras, GramRule, check_number, register
from fedld.aggregation.spectrum import spectrum


@register("pgrad")
@dataclass(frozen=True)
class PrincipalGradient(GramRule):
    """The leading axes of the centred models, turned to the average and summed, at the average's length.

    The authors train on one domain after the other, centre the points of that trajectory (its start
    included), take the leading axes v_l of their scatter, turn each towards the whole displacement, and give
    sum_l lambda_l / |lambda|_2 v_l the displacement's length. Clients train in parallel: the points are the
    start and the clients' models, and the displacement is the average update.
    """

    components: int = 4

    def __post_init__(self) -> None:
        check_number(self, "components", 1, whole=True)

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """X = [0, G], J = I - 11'/(m + 1): J X'X J e_l = lambda_l e_l and v_l = X J e_l / sqrt(lambda_l)."""
        points = len(p) + 1
        J = np.eye(points) - 1 / points
        axes = spectrum(J @ np.pad(K, (1, 0)) @ J, extras.precision)
        L = min(self.components, axes.rank)
        values, rows = axes.values[:L], (J @ axes.vectors[:, :L])[1:]
        towards = np.sign(rows.T @ (K @ p))
        c = rows @ (np.sqrt(values) * towards)
        square, length = (max(float(x @ K @ x), 0.0) for x in (c, p))
        return np.asarray(c * np.sqrt(length / square) if square > 0 else p.copy())
