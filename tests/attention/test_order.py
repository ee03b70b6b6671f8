import pytest

from shardkit.attention import tiles
from shardkit.attention.order import inverse_order, zigzag_chunks, zigzag_order, zigzag_sends


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
def test_zigzag_gives_every_device_an_early_and_a_late_chunk(shards):
    order = zigzag_order(4 * shards, shards)
    assert sorted(order) == list(range(4 * shards))
    assert [order[p] for p in inverse_order(order)] == list(range(4 * shards))
    work = [sum(i + 1 for i in order[4 * d : 4 * d + 4]) for d in range(shards)]
    assert len(set(work)) == 1  # columns that a causal mask leaves
    for half, pairs in enumerate(zigzag_sends(shards)):
        assert sorted(r for _, r in pairs) == list(range(shards))
        assert all(2 * sender + half in zigzag_chunks(shards)[receiver] for sender, receiver in pairs)


@pytest.mark.parametrize(("size", "shards"), [(6, 2), (0, 2), (4, 0)])
def test_zigzag_refuses_what_it_cannot_cut(size, shards):
    with pytest.raises(ValueError, match="must divide its length"):
        zigzag_order(size, shards)


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("target", [1, 2, 3, 100])
def test_tiles_of_a_causal_call_cover_what_is_seen_once(shards, target):
    size = 12 * shards
    for parts in (1, 2):
        order = zigzag_order(size, shards) if parts == 2 else tuple(range(size))
        side = tiles.tiling(12, parts, target)
        place = [i for i in range(side.laid) if i % (side.tiles * side.tile) < side.part]
        seen = []
        for device in range(shards):
            for other in range(shards):
                if device == other:
                    table = tiles.lower_tiles(side, side)
                elif parts == 2:
                    table = (tiles.columns_before if other < device else tiles.columns_after)(side, side)
                else:
                    table = tiles.all_tiles(side, side) if other < device else ()
                for r, c in table:
                    for i, a in enumerate(place):
                        for j, b in enumerate(place):
                            if a // side.tile == r and b // side.tile == c and (other != device or b <= a):
                                seen.append((order[device * 12 + i], order[other * 12 + j]))
        assert sorted(seen) == [(a, b) for a in range(size) for b in range(a + 1)]


def test_zigzag_steps_are_equally_long():
    side = tiles.tiling(64, 2, 8)
    assert len(tiles.columns_before(side, side)) == len(tiles.columns_after(side, side))
