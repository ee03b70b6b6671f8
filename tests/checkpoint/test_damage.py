"""What can go wrong with a folder of checkpoints: each is told in one error, and what is whole stays whole."""

import contextlib
import json
import os
import pickle
import re
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk
from shardkit.checkpoint import digests
from shardkit.hosts.digests import digest_of_text


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made")
    for step in (1, 2, 3):
        sk.save(path, tree(step), step)
    return path


def tree(step):
    mesh = sk.make_mesh({"a": 8})
    return {"w": sk.shard_tensor(np.full((64, 16), float(step)), {"a": sk.Shard(0)}, mesh), "step": step}


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def files(directory):
    found = (os.path.relpath(os.path.join(here, n), directory) for here, _, names in os.walk(directory) for n in names)
    return sorted(found)


def check_others(folder, lost):
    """All but the damaged one restore."""
    for step in {1, 2, 3} - {lost}:
        found = sk.restore(folder, tree(0), step=step)
        assert found["step"] == step
        np.testing.assert_array_equal(found["w"], float(step))


def damage(file, how):
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
        return
    if how == "flipped":
        content[len(content) // 3] ^= 0x10
    elif how == "truncated":
        del content[len(content) // 2 :]
    elif how == "emptied":
        content.clear()
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("how", ["missing", "flipped", "truncated", "emptied"])
def test_every_damaged_file_is_found_and_named(folder, how):
    written = [n for n in files(folder / "3") if n not in ("_CHECKPOINT_METADATA", "commit_success.txt", "SHA256SUMS")]
    assert len(written) >= 8
    for name in written:
        whole = (folder / "3" / name).read_bytes()
        damage(folder / "3" / name, how)
        target = tree(0)
        with pytest.raises(sk.CheckpointError, match=re.escape(name)) as caught:
            sk.restore(folder, target)
        assert "step 2 is whole: restore it with step=2" in str(caught.value)
        assert caught.value.previous == 2
        assert caught.value.file == str(folder / "3" / name)
        assert target["step"] == 0
        (folder / "3" / name).write_bytes(whole)
    check_others(folder, 0)


@pytest.mark.parametrize("how", ["missing", "truncated", "emptied", "flipped", "a line short"])
def test_a_damaged_list_is_found(folder, how):
    file = folder / "3" / "SHA256SUMS"
    if how == "a line short":
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    else:
        damage(file, how)
    with pytest.raises(sk.CheckpointError, match=r"step 2 is whole"):
        sk.restore(folder, tree(0))
    check_others(folder, 3)


def test_half_copied_checkpoints(folder, tmp_path):
    """As `cp` cut short leaves them: some files, in the order of names, of any size."""
    names = files(folder / "3")
    for count in range(1, len(names)):
        half = tmp_path / f"half{count}"
        shutil.copytree(folder / "2", half / "2")
        for name in names[:count]:
            (half / "3" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "3" / name, half / "3" / name)
        with pytest.raises(sk.CheckpointError, match=r"damaged.*step 2 is whole"):
            sk.restore(half, tree(0))
        assert sk.latest_step(half) == 2


def test_a_file_that_is_nobodys_is_left_alone(folder):
    (folder / "3" / ".DS_Store").write_bytes(b"x")
    assert sk.restore(folder, tree(0))["step"] == 3


def test_damage_without_another_one(folder):
    shutil.rmtree(folder / "1")
    shutil.rmtree(folder / "2")
    damage(folder / "3" / "shardkit.json", "truncated")
    with pytest.raises(sk.CheckpointError, match=r"there is no other whole one") as caught:
        sk.restore(folder, tree(0))
    assert caught.value.previous is None


def test_without_verification_missing_files_are_found_still(folder):
    damage(folder / "3" / "manifest.ocdbt", "missing")
    with pytest.raises(sk.CheckpointError, match=r"manifest.ocdbt is missing"):
        sk.restore(folder, tree(0), verify=False)


def test_a_loop_may_go_on_from_the_one_before(folder):
    damage(folder / "3" / "manifest.ocdbt", "flipped")
    damage(folder / "2" / "manifest.ocdbt", "missing")
    with sk.Checkpointer(folder) as checkpoints:
        with pytest.raises(sk.CheckpointError, match=r"step 1 is whole"):
            checkpoints.resume(tree(0))
        with pytest.warns(UserWarning, match=r"manifest.ocdbt does not hold what was written.*Going on from there"):
            found, step = checkpoints.resume(tree(0), damaged="previous")
        assert (step, found["step"]) == (1, 1)
        # The damaged ones are in nobody's way.
        assert sorted(os.listdir(folder)) == ["1", "2.damaged", "3.damaged"]
        checkpoints.save(tree(2), 2)
        with pytest.raises(ValueError, match=r"damaged='ignore'"):
            checkpoints.resume(tree(0), damaged="ignore")


def test_a_loop_ends_where_all_are_damaged(folder):
    """Their files are all there, so that each is taken for whole until it's read."""
    for step in "123":
        damage(folder / step / "manifest.ocdbt", "flipped")
    with sk.Checkpointer(folder) as checkpoints:
        with (
            pytest.warns(UserWarning, match="Going on from there") as told,
            pytest.raises(sk.CheckpointError, match=r"run/1 is damaged"),
        ):
            checkpoints.resume(tree(0), damaged="previous")
        assert len(told) == 2
        assert checkpoints.steps() == [1, 2, 3]


def test_what_is_not_a_checkpoint(folder, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "other" / "sub").mkdir(parents=True)
    (tmp_path / "unfinished" / "7.orbax-checkpoint-tmp").mkdir(parents=True)
    for path, message in [
        ("nothing", "there is no checkpoint at .*nothing: nothing is there"),
        ("file", "file is a file; a checkpoint is a folder"),
        ("other", "other holds no checkpoint: no folder named by a step in it, but sub"),
        ("unfinished", "only one that was never finished"),
    ]:
        with pytest.raises(sk.CheckpointError, match=message):
            sk.restore(tmp_path / path, tree(0))
    with pytest.raises(sk.CheckpointError, match=r"holds no step 9; there are 1, 2, 3"):
        sk.restore(folder, tree(0), step=9)
    assert sk.restore(folder / "2", tree(0))["step"] == 2
    with pytest.raises(sk.CheckpointError, match=r"is the checkpoint of step 2, and step=3 was asked for"):
        sk.restore(folder / "2", tree(0), step=3)
    (folder / "9").mkdir()
    with pytest.raises(sk.CheckpointError, match=r"SHA256SUMS is missing.*step 3 is whole"):
        sk.restore(folder, tree(0))


def test_a_target_that_differs_is_told_whole(folder):
    target = {"w": jnp.zeros((64, 8)), "new": jnp.zeros(3), "step": np.float32(1), "more": {"a/b": "text"}}
    with pytest.raises(sk.CheckpointError) as caught:
        sk.restore(folder, target)
    assert str(caught.value).splitlines()[1:] == [
        "  more/a/b: not in the checkpoint; the target has str",
        "  new: not in the checkpoint; the target has float64[3]",
        "  step: int in the checkpoint, float32[] in the target",
        "  w: float64[64, 16] in the checkpoint, float64[64, 8] in the target",
        "Nothing was restored. Make the target as the saved tree was, or give partial=True to leave unread what only "
        "the checkpoint has",
    ]
    with pytest.raises(
        sk.CheckpointError, match=r"w: float64\[64, 16\] in the checkpoint, float32\[64, 16\] in the target"
    ):
        sk.restore(folder, {"w": jnp.zeros((64, 16), jnp.float32), "step": 0})
    with pytest.raises(sk.CheckpointError, match=r"step: not in the target; the checkpoint has int"):
        sk.restore(folder, {"w": jnp.zeros((64, 16))})


def test_long_lists_of_differences_are_cut(folder):
    with pytest.raises(sk.CheckpointError, match=r"and 12 more"):
        sk.restore(folder, {f"x{i}": 0 for i in range(30)})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "bad/0 is of type object; a checkpoint holds arrays"),
        (np.array(["a"]), "bad/0 is an array of dtype <U1"),
        (lambda x: x, "bad/0 is of type function"),
        ("partial", "bad/0 is a PartialArray"),
    ],
)
def test_what_no_checkpoint_can_hold(tmp_path, value, message):
    if isinstance(value, str):
        value = sk.from_local([np.ones(2)] * 8, {"a": sk.Partial()}, sk.make_mesh({"a": 8}))
    with pytest.raises(TypeError, match=message):
        sk.save(tmp_path / "run", {"bad": [value]}, 1)
    assert not (tmp_path / "run").exists()


def test_steps_that_are_none(folder):
    for step in (-1, 1.5, "3", True):
        with pytest.raises(ValueError, match=r"give an integer, 0 or more"):
            sk.save(folder, tree(1), step)
    with pytest.raises(sk.CheckpointError, match=r"holds step 3 already; nothing was written"):
        sk.save(folder, tree(1), 3)
    sk.save(folder, tree(7), 3, overwrite=True)
    assert sk.restore(folder, tree(0))["step"] == 7
    for name in ("every", "keep"):
        with pytest.raises(ValueError, match=f"{name}=0: give an integer, 1 or more"):
            sk.Checkpointer(folder, **{name: 0})


@contextlib.contextmanager
def full_disk():
    """No file may grow beyond a few thousand bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_what_was_there(folder):
    before = {name: (folder / name).read_bytes() for name in files(folder)}
    big = {"w": jax.random.normal(jax.random.key(0), (64, 256)), "step": 4}
    with (
        full_disk(),
        pytest.raises(sk.CheckpointError, match=r"could not be written.*the newest whole one there is step 3") as e,
    ):
        sk.save(folder, big, 4)
    assert e.value.previous == 3
    assert sk.latest_step(folder) == 3
    assert {n: (folder / n).read_bytes() for n in files(folder) if "tmp" not in n} == before
    sk.save(folder, big, 4)
    assert sorted(os.listdir(folder)) == ["1", "2", "3", "4"]


def test_a_loop_hears_of_a_full_disk_at_its_next_save(folder):
    big = {"w": jax.random.normal(jax.random.key(0), (64, 256))}
    with sk.Checkpointer(folder) as checkpoints:
        with full_disk(), contextlib.suppress(sk.CheckpointError):  # it may be found at once
            checkpoints.save(big, 4)
            with pytest.raises(sk.CheckpointError, match=r"the newest whole one there is step 3"):
                checkpoints.save(big, 5)
        checkpoints.save(big, 6)
    assert sk.latest_step(folder) == 6


@contextlib.contextmanager
def read_only(path):
    """Nothing may be written there; for root nothing is read-only, so be someone else meanwhile."""
    path.parent.chmod(0o755)
    path.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(0o755)


def test_a_read_only_folder(made):
    for directory in made.parents:  # pytest's own, which nobody else may enter
        if "pytest" in directory.name or "popen" in directory.name:
            directory.chmod(0o755)
    with (
        read_only(made),
        pytest.raises(sk.CheckpointError, match=r"Permission denied.*the newest whole one there is step 3"),
    ):
        sk.save(made, tree(4), 4)
    assert sk.latest_step(made) == 3


def test_a_folder_below_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(sk.CheckpointError, match=r"could not be written.*there is no whole one yet"):
        sk.save(tmp_path / "file" / "run", tree(1), 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(3, "uint4"), r"bad is an array of dtype uint4; a checkpoint holds jax.random keys and bool, "),
        (np.zeros(3, "V5"), "bad is an array of dtype"),
        (np.zeros(3, np.longdouble), "bad is an array of dtype"),
        (np.ma.array([1.0], mask=[True]), "bad is a masked array; save its data and its mask"),
    ],
    ids=["uint4", "void", "longdouble", "masked"],
)
def test_arrays_of_which_orbax_would_lose_something(tmp_path, value, message):
    with pytest.raises(TypeError, match=message):
        sk.save(tmp_path / "run", {"bad": value}, 1)
    assert not (tmp_path / "run").exists()


def test_arrays_that_are_not_there(tmp_path):
    mesh = sk.make_mesh({"a": 8})
    for x in (jnp.ones(8), sk.shard_tensor(jnp.ones(8), {"a": sk.Shard(0)}, mesh)):
        target = {"gone": x}
        sk.save(tmp_path, target, 1, overwrite=True)
        x.delete()
        with pytest.raises(ValueError, match="gone was deleted, by being donated"):
            sk.save(tmp_path, target, 2)
        np.testing.assert_array_equal(sk.restore(tmp_path, target)["gone"], np.ones(8))
    with pytest.raises(TypeError, match="traced is traced, and has no value yet"):
        jax.jit(lambda x: sk.save(tmp_path, {"traced": x}, 2))(jnp.ones(2))


def test_what_is_written_over_stays_until_the_new_one_is_whole(folder):
    big = {"w": jax.random.normal(jax.random.key(0), (64, 256)), "step": 4}
    with full_disk(), pytest.raises(sk.CheckpointError, match=r"the newest whole one there is step 3"):
        sk.save(folder, big, 3, overwrite=True)
    assert sorted(os.listdir(folder)) == ["1", "2", "3"]
    check_others(folder, 0)
    sk.save(folder, tree(7), 3, overwrite=True)
    assert sorted(os.listdir(folder)) == ["1", "2", "3"]
    assert sk.restore(folder, tree(0))["step"] == 7


def test_a_job_that_ended_before_the_new_one_took_its_place(folder):
    """Between two renames there's the old one under no name, and the new one under another."""
    (folder / "3").rename(folder / "3.new")
    with sk.Checkpointer(folder) as checkpoints:
        assert checkpoints.resume(tree(0))[1] == 3
    (folder / "3").rename(folder / "3.new")
    (folder / "2").rename(folder / "2.new")
    (folder / "2.new" / "shardkit.json").unlink()
    sk.save(folder, tree(4), 4)
    assert sorted(os.listdir(folder)) == ["1", "3", "4"]
    check_others(folder, 2)


def test_only_checkpoints_are_deleted(folder, tmp_path):
    """A folder may have a number for its name and be something else; a link's end is elsewhere."""
    (folder / "0" / "of somebody").mkdir(parents=True)
    (folder / "002").mkdir()
    (folder / "٣").mkdir()
    (folder / "1").rename(tmp_path / "elsewhere")
    (folder / "1").symlink_to(tmp_path / "elsewhere")
    sk.save(folder, tree(4), 4, keep=1)
    assert sorted(os.listdir(folder)) == ["0", "002", "4", "٣"]
    assert (folder / "0" / "of somebody").is_dir()
    assert (tmp_path / "elsewhere" / "shardkit.json").exists()
    assert sk.restore(folder, tree(0))["step"] == 4


def test_the_folder_of_a_damaged_step_is_one_still(folder):
    damage(folder / "3" / "shardkit.json", "missing")
    with pytest.raises(sk.CheckpointError, match=r"shardkit.json is missing.*step 2 is whole") as caught:
        sk.restore(folder / "3", tree(0))
    assert caught.value.file == str(folder / "3" / "shardkit.json")


def test_without_verification_what_is_read_is_told(folder):
    whole = (folder / "3" / "shardkit.json").read_bytes()
    damage(folder / "3" / "shardkit.json", "truncated")
    with pytest.raises(sk.CheckpointError, match=r"shardkit.json does not hold what was written"):
        sk.restore(folder, tree(0), verify=False)
    (folder / "3" / "shardkit.json").write_bytes(whole)
    for name in files(folder / "3" / "d"):
        damage(folder / "3" / "d" / name, "emptied")
    with pytest.raises(sk.CheckpointError, match=r"the arrays of .*3 could not be read, and nothing was restored"):
        sk.restore(folder, tree(0), verify=False)


def test_a_newer_format_is_told(folder):
    contents = json.loads((folder / "3" / "shardkit.json").read_text())
    text = json.dumps(contents | {"format": 99})
    (folder / "3" / "shardkit.json").write_text(text)
    listed = digests.from_text((folder / "3" / "SHA256SUMS").read_text())
    listed["shardkit.json"] = digest_of_text(text)
    (folder / "3" / "SHA256SUMS").write_text(digests.to_text(listed))
    with pytest.raises(sk.CheckpointError, match="of format 99, of a newer shardkit; this one reads up to 1"):
        sk.restore(folder, tree(0))


def test_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sk.save("~/run", {"x": 1}, 1)
    assert sk.latest_step(tmp_path / "run") == 1
    monkeypatch.chdir(tmp_path)
    with sk.Checkpointer("here") as checkpoints:
        monkeypatch.chdir("/")
        checkpoints.save({"x": 1}, 1)
    assert sk.latest_step(tmp_path / "here") == 1
    for path in ("", b"bytes"):
        with pytest.raises(ValueError, match="give the folder of the checkpoints as text"):
            sk.save(path, {"x": 1}, 1)
    # Orbax takes such a name for a pattern, and would lose the arrays.
    with pytest.raises(ValueError, match=r"orbax can't write below a folder with '\[' in its name"):
        sk.save(tmp_path / "lr=[1]", {"x": 1}, 1)


def test_an_error_can_be_sent_elsewhere():
    error = sk.CheckpointError("words", file="f", previous=3)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.file, again.previous) == ("words", "f", 3)
