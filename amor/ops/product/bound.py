"""How far the entropy of an 8-bit head can be from the exact one: a bound that holds for every input.

Let z be the exact logits, z8 those of the 8-bit head, d = z - z8, and z(t) = z8 + t d with its softmax p(t).

1. |d_v| <= e_v, where e_v = |x| r_v + slack: Cauchy-Schwarz on w_v - w8_v, whose length r_v is known from packing. The slack
   covers the rounding of x to 16 bits and of float32 sums: at most (|x8 - x| + c |x|) times the longest row of W.
2. dH/dt = -Cov_t(d, z(t)), so |dH/dt| <= std_t(d) std_t(z(t)).
3. With e = max e_v, p_v(t) <= exp(2 t e) p8_v. A variance is the least mean square about any point, so
   std_t(z8) <= exp(t e) S, with S the spread of z8 under p8; and std_t(d) <= exp(t e) E, with E^2 = sum p8_v e_v^2.
4. std_t(z(t)) <= std_t(z8) + t std_t(d). Integrating 2. over t from 0 to 1:

       |H - H8| <= E S (exp(2 e) - 1) / (2 e) + E^2 exp(2 e) / 2          (e -> 0: E S + E^2 / 2)

Because E is weighted by the softmax, rows of W that the 8 bits serve badly count only as far as their tokens are likely.
"""

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.ops.product.matrix import Matrix, Probe

HALF_STEP = 0.5 / 32767  # rounding x to 16 bits moves a number by at most this share of the row's largest
ROUNDING = 2.0**-24
EVALUATION = 1e-5  # of exp, and of entropies in float32, relative to 1 + spread + entropy: an order above what is met


def errors(x: Tensor, matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Length and slack [R] of x [R, K]: an 8-bit logit is off by at most length * r_v + slack."""
    x = x.double()
    length = x.square().sum(1).sqrt()
    moved = x.abs().amax(1) * HALF_STEP * matrix.inner**0.5
    # a float32 sum of K products in any order errs by at most K roundings of sum |w_k x_k| <= |w| |x|; both heads sum
    return length + moved, matrix.longest * (moved + 2 * (matrix.inner + 16) * ROUNDING * length)


def bound(x: Tensor, matrix: Matrix, probe: Probe) -> Tensor:
    """[R] nats by which the exact entropy of x [R, K] may differ from the 8-bit probe's."""
    if matrix.residuals is None or probe.residual is None:
        raise AmorError("a bound needs a probe of 8-bit weights; float32 weights are exact")
    length, slack = errors(x, matrix)
    most = matrix.worst * length + slack
    mean = probe.residual.double() * length + slack  # root mean square of a sum <= sum of root mean squares
    growth = torch.where(most > 1e-6, torch.expm1(2 * most) / (2 * most), 1 + 2 * most)
    evaluation = EVALUATION * (1 + probe.spread.double() + probe.entropy.double())
    return (mean * probe.spread * growth + mean.square() * torch.exp(2 * most) / 2 + evaluation).float()
