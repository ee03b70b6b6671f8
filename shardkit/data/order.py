"""Which records a batch has: a function of the seed and the epoch alone, whatever the processes and devices."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Place:
    """The next batch: ``batch`` of ``epoch``, both from 0."""

    epoch: int = 0
    batch: int = 0


@dataclasses.dataclass(frozen=True)
class Order:
    """The batches of all epochs.

    Attributes:
      records: how many there are.
      batch_size: of the global batch.
      shuffle: whether each epoch has an order of its own,
        ``np.random.default_rng([seed, epoch]).permutation(records)``.
      seed: of the shuffling.
      epochs: how often each record comes; None for ever.
      short: whether a last batch that isn't full counts.
    """

    records: int
    batch_size: int
    shuffle: bool
    seed: int
    epochs: int | None
    short: bool

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch."""
        full, rest = divmod(self.records, self.batch_size)
        return full + (1 if rest and self.short else 0)

    @property
    def total(self) -> int | None:
        """Batches of all epochs; None for ever."""
        return None if self.epochs is None else self.epochs * self.per_epoch

    def ended(self, place: Place) -> bool:
        """Whether there's nothing any more."""
        return self.epochs is not None and place.epoch >= self.epochs

    def after(self, place: Place) -> Place:
        """The place of the batch after that one."""
        return self.normal(Place(place.epoch, place.batch + 1))

    def normal(self, place: Place) -> Place:
        """Behind the last batch of an epoch is the first of the next one."""
        return Place(place.epoch + 1, 0) if place.batch == self.per_epoch else place

    def number(self, place: Place) -> int:
        """Batches before that one, from the very first."""
        return place.epoch * self.per_epoch + place.batch

    def rows(self, place: Place) -> np.ndarray:
        """The records of a batch, in order; fewer than ``batch_size`` in a short one."""
        start = place.batch * self.batch_size
        stop = min(start + self.batch_size, self.records)
        if not self.shuffle:
            return np.arange(start, stop)
        return _permutation(self.seed, place.epoch, self.records)[start:stop]


@functools.lru_cache(2)  # a training set and one for evaluation
def _permutation(seed: int, epoch: int, records: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(records)
