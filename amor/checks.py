"""Checks of numbers a user gives: what is impossible is refused with the name of the key and what would be right.

They lie below config.py, because the options of mixers and gates use them and config.py reaches those by name.
"""

from amor.errors import AmorError


def at_least(where: str, value: float, least: float) -> None:
    if not value >= least:
        raise AmorError(f"{where} is {value}; it must be at least {least}")


def divides(where: str, whole: int, part: int, what: str) -> None:
    """`part` must divide `whole`; the message names the nearest sizes that would."""
    if part < 1 or whole % part:
        fitting = [p for p in range(1, whole + 1) if whole % p == 0]
        best = min(fitting, key=lambda p: abs(p - part))
        raise AmorError(f"{where}: {what} {part} does not divide {whole}; the nearest that does is {best}")


def even_heads(where: str, head_size: int) -> None:
    if head_size % 2:
        raise AmorError(f"{where} is {head_size}; rotary embedding turns pairs, so it must be even, e.g. {head_size + 1}")
