"""Which records come when."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardkit.data.order import Order, Place


@given(st.integers(1, 20), st.integers(1, 8), st.booleans(), st.booleans(), st.integers(0, 5))
def test_every_record_once_an_epoch(records, size, shuffle, short, seed):
    order = Order(records, size, shuffle, seed, 2, short)
    place, found = Place(), [[], []]
    assume(order.per_epoch)
    for number in range(order.total):
        assert order.number(place) == number and not order.ended(place)
        rows = order.rows(place)
        assert len(rows) == size or (short and place.batch == order.per_epoch - 1)
        found[place.epoch] += rows.tolist()
        place = order.after(place)
    assert order.ended(place) and place == Place(2, 0)
    count = records if short else records // size * size
    for epoch, rows in enumerate(found):
        wanted = np.random.default_rng([seed, epoch]).permutation(records) if shuffle else np.arange(records)
        assert rows == wanted[:count].tolist()


def test_orders_differ():
    first = [Order(50, 50, True, seed, 1, False).rows(Place(epoch)).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(rows) for rows in first}) == 4


@pytest.mark.parametrize("epochs", [None, 3])
def test_total(epochs):
    order = Order(10, 4, False, 0, epochs, True)
    assert order.total == (None if epochs is None else 9)
    assert order.ended(Place(3)) is (epochs is not None)
