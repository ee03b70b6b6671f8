import pytest

from shardkit.inspect import shapes


@pytest.mark.parametrize(
    ("text", "arrays", "size"),
    [
        ("f32[]", [("f32", ())], 4),
        ("bf16[4096,2048]{1,0:T(8,128)(2,1)S(1)}", [("bf16", (4096, 2048))], 2 * 4096 * 2048),
        ("s32[]{:T(128)S(6)}", [("s32", ())], 4),
        ("f32[<=16,4]{1,0}", [("f32", (16, 4))], 256),
        ("s4[3]", [("s4", (3,))], 2),
        ("pred[5]{0}", [("pred", (5,))], 5),
        ("c128[2]", [("c128", (2,))], 32),
        ("f8e4m3fn[7]", [("f8e4m3fn", (7,))], 7),
        ("f32[0,4]", [("f32", (0, 4))], 0),
        ("token[]", [("token", ())], 0),
        (
            "((f32[2]{0}, /*index=1*/f32[3]{0:T(128)}), bf16[4]{0}, u32[])",
            [("f32", (2,)), ("f32", (3,)), ("bf16", (4,)), ("u32", ())],
            8 + 12 + 8 + 4,
        ),
        ("()", [], 0),
    ],
)
def test_arrays_and_bytes(text, arrays, size):
    found = shapes.arrays(shapes.parse_shape(text))
    assert list(found) == arrays
    assert sum(map(shapes.array_bytes, found)) == size


@pytest.mark.parametrize("text", ["", "banana", "f32[2], f32[3]"])
def test_refuses_what_is_no_shape(text):
    with pytest.raises(ValueError, match="not a shape"):
        shapes.parse_shape(text)
