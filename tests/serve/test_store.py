"""Adapters come, go, are replaced and evicted, and nobody who uses one notices."""

import threading

import pytest
import torch
from harness import make_model, save_adapters

import foreword as fw
from foreword.errors import ForewordError
from foreword.serve.gate import Gate
from foreword.serve.store import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters")
    save_adapters(path, ["prefix-tuning"] * 6)
    return path


@pytest.fixture
def store(folder):
    store = Store(make_model())
    store.scan(folder)
    return store


def size(store):
    return store.get("a0").size


def test_an_adapter_is_on_the_model_while_it_is_leased(store):
    lease = store.lease("a0")
    assert store.resident() == ["a0"]
    assert lease.key in fw.adapters(store.host.model)
    assert store.host.active is None  # nobody reads it unasked


def test_a_lease_loads_the_saved_numbers_in_their_stored_form(folder, tmp_path):
    model = make_model()
    adapter = fw.attach(model, fw.PrefixTuning(length=3, reparam="shared", hidden=8))
    ids = torch.arange(3, 9)[None]
    expected = model(ids).logits
    adapter.save(tmp_path / "mlp")
    store = Store(make_model())
    store.register("mlp", tmp_path / "mlp")
    lease = store.lease("mlp")
    assert lease.adapter.folded
    assert not lease.adapter.model.foreword.shared
    with fw.rows(store.host.model, [lease.key]):
        torch.testing.assert_close(store.host.model(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_the_least_recently_used_goes_first(store):
    store.resident_bytes = 2 * size(store)
    for name in ("a0", "a1", "a0", "a2"):
        store.release(store.lease(name))
    assert store.resident() == ["a2", "a0"]
    assert store.bytes_resident <= store.resident_bytes
    assert len(fw.adapters(store.host.model)) == 2


def test_a_leased_adapter_stays_and_there_is_no_room(store):
    store.resident_bytes = 2 * size(store)
    first, second = store.lease("a0"), store.lease("a1")
    assert store.lease("a2") is None
    store.release(first)
    third = store.lease("a2")
    assert {second.key, third.key} == set(fw.adapters(store.host.model))


def test_a_replaced_adapter_finishes_beside_its_successor(store, folder):
    old = store.lease("a0")
    store.register("a0", folder / "a1")
    new = store.lease("a0")
    assert {old.key, new.key} <= set(fw.adapters(store.host.model))
    assert store.release(old)
    store.sweep()
    assert fw.adapters(store.host.model) == [new.key]


def test_an_unregistered_adapter_goes_with_its_last_lease(store):
    first, second = store.lease("a0"), store.lease("a0")
    store.unregister("a0")
    assert "a0" not in store.names
    assert not store.release(first)
    assert store.release(second)
    store.sweep()
    assert fw.adapters(store.host.model) == []


def test_numbers_kept_in_memory_need_no_file(store, folder, tmp_path):
    import shutil

    shutil.copytree(folder / "a0", tmp_path / "gone")
    store.register("gone", tmp_path / "gone")
    store.resident_bytes = size(store)
    store.release(store.lease("gone"))
    store.release(store.lease("a0"))  # in its place
    assert store.resident() == ["a0"]
    shutil.rmtree(tmp_path / "gone")
    assert store.lease("gone") is not None


def test_memory_has_a_budget(store, folder):
    store.memory_bytes = 2 * size(store)
    for name in store.names:
        store.release(store.lease(name))
    assert [one.name for one in store._memory] == ["a4", "a5"]


def test_a_bad_folder_leaves_no_trace(store, folder, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    with pytest.raises(ForewordError, match="does not exist"):
        store.register("nothing", tmp_path)
    bad = shutil.copytree(folder / "a0", tmp_path / "bad")
    [weights] = bad.glob("*.safetensors")
    tensors = load_file(weights)
    save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, weights)
    store.register("bad", bad)
    with pytest.raises(ForewordError, match="not finite"):
        store.lease("bad")
    assert fw.adapters(store.host.model) == []
    assert store.lease("a0") is not None


def test_weights_that_all_rows_share_are_refused(tmp_path):
    model = make_model()
    fw.attach(model, "ia3", name="x").save(tmp_path / "x")
    store = Store(make_model())
    store.register("x", tmp_path / "x")
    with pytest.raises(ForewordError, match="ia3 changes weights that all rows"):
        store.lease("x")


def test_an_adapter_larger_than_the_budget_is_refused(store, folder):
    store.resident_bytes = size(store) - 1
    with pytest.raises(ForewordError, match="bytes"):
        store.register("a0", folder / "a0")


def test_adapters_come_and_go_while_another_thread_runs_the_model(folder):
    """Adapters with hooks on layers (parallel adapters, LoRA) too: a forward never sees half of one."""
    model = make_model()
    gate = Gate(fw.attach(model, "prefix-tuning", name="mine").host.layout.stacks)
    fw.set_active(model, None)
    store = Store(model, gate=gate)
    extra = folder.parent / "hooked"
    save_adapters(extra, ["parallel-adapter", "lora", "prefix-tuning"], start=10)
    store.scan(extra)
    store.resident_bytes = max(store.get(name).size for name in store.names)
    ids = torch.arange(3, 40)[None]
    with fw.rows(model, ["mine"]), torch.no_grad():
        expected = model(ids).logits
    wrong, stop = [], threading.Event()

    def run():
        with fw.rows(model, ["mine"]), torch.no_grad():
            while not stop.is_set():
                if not torch.equal(model(ids).logits, expected):
                    wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            for name in ("a10", "a11", "a12"):
                store.release(store.lease(name))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
