"""The count of orders: the same as going through all of them, and none where that would take too long."""

from itertools import permutations
from math import comb, factorial

from hypothesis import given
from hypothesis import strategies as st

from tpbed.tp import orders
from tpbed.tp.orders import count_orders


@st.composite
def partial_orders(draw):
    """Of each step, all that come before it, as bits."""
    pasts = []
    for number in range(draw(st.integers(0, 6))):
        past = 0
        for other in range(number):
            if draw(st.booleans()):
                past |= pasts[other] | 1 << other
        pasts.append(past)
    return pasts


def is_order(taken, pasts):
    return all(pasts[step] & ~sum(1 << other for other in taken[:place]) == 0 for place, step in enumerate(taken))


@given(pasts=partial_orders())
def test_the_count_is_that_of_all_permutations_that_keep_the_order(pasts):
    assert count_orders(pasts) == sum(is_order(taken, pasts) for taken in permutations(range(len(pasts))))


def test_parts_that_do_not_interleave_cost_nothing():
    rounds = [(1 << 16 * number) - 1 for number in range(50) for _ in range(16)]
    assert count_orders(rounds) == factorial(16) ** 50
    chains = [sum(1 << 2 * before for before in range(number // 2)) << number % 2 for number in range(400)]
    assert count_orders(chains) == comb(400, 200)


def test_a_tangle_that_is_too_large_is_not_counted(monkeypatch):
    fence = [0, 0, 0b11, 0b10]
    assert count_orders(fence) == 5
    monkeypatch.setattr(orders, "MOST", 1)
    assert count_orders(fence) is None
