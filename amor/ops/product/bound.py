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

That lets every token err in the worst direction at once, and one x cannot be along what was lost of all of them. With R the
residuals at length 1, d = diag(r) R x + s, |s_v| <= slack, and |R x| <= gain |x|, so by Cauchy-Schwarz over tokens

5. |Cov_t(d - s, z(t))| = |sum p_v(t) d_v (z_v(t) - m_t)| <= gain |x| sqrt(sum (p_v(t) r_v (z_v(t) - m_t))^2), m_t the mean
6. z_v(t) - m_t is off from z8_v - m_8 by at most 2 t e + E S (exp(2 e) - 1) / (2 e), by 1. and as in 2. and 3., hence

       |H - H8| <= gain |x| (g (Q + E S g Q0) + e exp(2 e) Q0) + slack (S g + E exp(2 e) / 2)

   with g = (exp(2 e) - 1) / (2 e), Q^2 = sum (p8_v r_v (z8_v - m_8))^2 and Q0^2 = sum (p8_v r_v)^2.

Many small p8_v have a small root of squares: where no token with an error is likely, this is by far the narrower one. Either
bound holds for any approximation z8 of z with |d_v| as in 1., so also where some logits are exact and their r_v is 0.
"""

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.ops.product.matrix import Matrix

ROUNDING = 2.0**-24
EVALUATION = 1e-5  # of exp, and of entropies in float32, relative to 1 + spread + entropy: an order above what is met


def errors(x: Tensor, matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Length and slack [R] of x [R, K]: a product with a rounded row is off by at most length * r_v + slack."""
    assert matrix.lost is not None
    x = x.double()
    length, moved = x.square().sum(1).sqrt(), matrix.format.moved(x)
    # a float32 sum of K products in any order errs by at most K roundings of sum |w_k x_k| <= |w| |x|; both heads sum
    return length + moved, matrix.lost.longest * (moved + 2 * (matrix.inner + 16) * ROUNDING * length)


def bound(x: Tensor, matrix: Matrix, z: Tensor, residuals: Tensor | None = None) -> Tensor:
    """[R] nats by which the exact entropy of x [R, K] may differ from that of 8-bit logits z [R, V].

    residuals [R, V]: r_v of each row's tokens, where some of its logits are exact.
    """
    lost = matrix.lost
    if lost is None:
        raise AmorError("a bound needs what rounding took from the weights: pack(weight, 'int8', bounded=True)")
    r = (lost.residuals if residuals is None else residuals).double()
    logp = z.double().log_softmax(1)
    p = logp.exp()
    entropy = -(p * logp).sum(1)
    centred = logp + entropy[:, None]
    spread = (p * centred.square()).sum(1).sqrt()
    length, slack = errors(x, matrix)
    most = lost.worst * length + slack
    growth = torch.where(most > 1e-6, torch.expm1(2 * most) / (2 * most), 1 + 2 * most)
    top = torch.exp(2 * most)
    mean = (p * r.square()).sum(1).sqrt() * length + slack  # root mean square of a sum <= sum of root mean squares
    each = mean * spread * growth + mean.square() * top / 2
    q, q0 = ((p * r * t).square().sum(1).sqrt() for t in (centred, torch.ones_like(p)))
    together = lost.gain * length * (growth * (q + mean * spread * growth * q0) + most * top * q0)
    together = together + slack * (spread * growth + mean * top / 2)
    evaluation = EVALUATION * (1 + spread + entropy)
    return (torch.minimum(each, together.nan_to_num(torch.inf)) + evaluation).float()
