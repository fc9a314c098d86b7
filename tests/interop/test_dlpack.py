# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The bridge: no copies, every refusal, memory that lives as long as it is used."""

from __future__ import annotations

import gc
import itertools
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import jaxfp8  # noqa: E402
from jaxfp8_torch import (  # noqa: E402
    borrowing,
    crossing,
    devices,
    dlpack,
    from_torch,
    jaxlib_compat,
    lending,
    to_torch,
)
from tests.interop.tensors import DEVICES, assert_same_bits, placed, tensor  # noqa: E402

RNG = np.random.default_rng(0)
on_each_device = pytest.mark.parametrize("device", DEVICES)


def draw(dtype, *shape, device="cpu"):
    x = RNG.standard_normal(shape) * 50
    return tensor(x.astype(devices.DTYPES[dtype]), device)


@on_each_device
@pytest.mark.parametrize("dtype", devices.DTYPES, ids=str)
def test_both_ways_on_the_same_memory(dtype, device):
    x = draw(dtype, 6, 2, 64, device=device)
    crossed = from_torch("x", x)
    assert crossed.unsafe_buffer_pointer() == x.data_ptr()
    assert_same_bits(x, crossed)
    back = to_torch(crossed)
    assert back.data_ptr() == x.data_ptr()
    assert back.dtype == dtype
    assert back.device == x.device
    made = jnp.asarray(crossed + 0 if dtype == torch.int32 else crossed * 1)
    assert to_torch(made).data_ptr() == made.unsafe_buffer_pointer()


@pytest.mark.parametrize("message", ["UNIMPLEMENTED: no streams", "INTERNAL: broken"])
def test_a_plugin_that_names_no_stream_leaves_the_order_to_jax(message):
    class Device:
        def get_stream_for_external_ready_events(self):
            raise jax.errors.JaxRuntimeError(message)

    if message.startswith("UNIMPLEMENTED"):
        assert jaxlib_compat.external_stream(Device()) is None
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
            jaxlib_compat.external_stream(Device())


@on_each_device
@pytest.mark.parametrize("direct", [True, False])
def test_a_call_crosses_with_and_without_the_functions_of_jaxlib(direct, device, monkeypatch):
    assert jaxlib_compat.available()
    if not direct:
        monkeypatch.setattr(jaxlib_compat, "_to_array", None)
    tensors = [draw(torch.float32, 6, 2, 64, device=device) for _ in range(3)]
    tensors.insert(1, torch.empty(0, 3, device=device))
    arrays = crossing.to_jax(*tensors)
    for x, crossed in zip(tensors, arrays, strict=True):
        assert_same_bits(x, crossed)
        assert not x.numel() or crossed.unsafe_buffer_pointer() == x.data_ptr()
    outputs = jax.jit(lambda a, b, c, d: (a + c, b, c * d))(*arrays)
    a, empty, b = crossing.to_torch(*outputs)
    assert torch.equal(a, tensors[0] + tensors[2])
    assert torch.equal(b, tensors[2] * tensors[3])
    assert empty.shape == (0, 3)
    assert a.data_ptr() == outputs[0].unsafe_buffer_pointer()
    assert from_torch("x", tensors[0]).unsafe_buffer_pointer() == tensors[0].data_ptr()


@on_each_device
@pytest.mark.parametrize("dtype", devices.DTYPES, ids=str)
def test_memory_that_is_borrowed(dtype, device):
    """By a capsule that owns nothing: of the same pointer, shape and dtype as torch's own."""
    on_jax = devices.jax_device(torch.device(device))
    kind = borrowing.DEVICE_TYPE[device]
    for shape in ((6, 2, 64), (128,), (6, 2, 64)):
        x = draw(dtype, *shape, device=device)
        capsule = borrowing.capsule(x.data_ptr(), x.shape, dtype, x.device)
        crossed = jaxlib_compat.array_of_dlpack(capsule, on_jax, kind)
        assert crossed.unsafe_buffer_pointer() == x.data_ptr()
        assert_same_bits(x, crossed)
        del crossed, capsule
        gc.collect()
        assert_same_bits(x, from_torch("x", x))


@on_each_device
def test_memory_that_kernels_cannot_read_in_place_is_copied(device, monkeypatch):
    monkeypatch.setitem(crossing.KERNEL_ALIGNMENT, device, 256)
    for offset, in_place in ((0, True), (64, False), (128, True)):
        x = placed(draw(torch.bfloat16, 6, 2, 64, device=device), 256, 2 * offset)
        readable = crossing.readable(x)
        (crossed,) = crossing.to_jax(readable)
        assert (crossed.unsafe_buffer_pointer() == x.data_ptr()) == in_place
        assert_same_bits(x, crossed)


@on_each_device
def test_columns_of_a_wider_tensor_are_taken_whole(device):
    wide = draw(torch.bfloat16, 40, 3, 256, device=device)
    for view, start, rows in (
        (wide[:, :, 128:], 128, slice(None)),
        (wide[:, :, :128], 0, slice(None)),
        (wide[8:, :, 128:], 128, slice(8, None)),
        (wide[:8, :, 64:192], 64, slice(0, 8)),
    ):
        crossed = from_torch("v", view)
        assert isinstance(crossed, jaxfp8.HeadSlice)
        assert (crossed.start, crossed.size) == (start, view.shape[2])
        assert crossed.array.unsafe_buffer_pointer() == wide[rows].data_ptr()
        assert_same_bits(view, crossed.materialize())


def test_columns_are_found_whatever_the_offset_of_the_wider_tensor():
    """The wider tensor may itself begin anywhere in its storage, and end with it."""
    for offset, num_heads, start in itertools.product((0, 32, 4096), (1, 3), (0, 64, 128)):
        storage = draw(torch.bfloat16, offset + 5 * num_heads * 256)
        wide = storage[offset:].view(5, num_heads, 256)
        view = wide[:, :, start : start + 128]
        crossed = from_torch("v", view)
        assert_same_bits(view, crossed.materialize())


def test_columns_at_the_edges_of_their_storage_stay_inside_it():
    storage = draw(torch.bfloat16, 4 * 256 - 128)
    view = storage.as_strided((4, 1, 128), (256, 256, 1))
    with pytest.raises(ValueError, match="v: expected a contiguous tensor, or the columns"):
        from_torch("v", view)


def test_no_elements():
    for shape in ((0, 2, 64), (3, 0, 64), (0,)):
        x = torch.empty(shape, dtype=torch.bfloat16)
        crossed = from_torch("x", x)
        assert crossed.shape == shape
        assert tuple(to_torch(crossed).shape) == shape


def complex_negated():
    return torch.tensor([[1 + 2j, 3 - 4j]]).conj().imag


REFUSED = {
    "no tensor": (lambda: np.zeros(3), TypeError, "x: expected a torch.Tensor, got ndarray"),
    "meta": (lambda: torch.empty(3, device="meta"), TypeError, "got a meta tensor"),
    "int64": (
        lambda: torch.arange(3),
        TypeError,
        "x: expected dtype int32, got int64; it is not narrowed",
    ),
    "float64": (lambda: torch.ones(3).double(), TypeError, "expected dtype float32, got float64"),
    "complex": (lambda: torch.ones(3) * 1j, TypeError, "got complex64"),
    "bool": (lambda: torch.ones(3) > 0, TypeError, "got bool"),
    "sparse": (lambda: torch.ones(3, 3).to_sparse(), ValueError, "expected a dense tensor"),
    "gradient": (
        lambda: torch.ones(16, requires_grad=True),
        NotImplementedError,
        "x: requires a gradient",
    ),
    "negated": (complex_negated, ValueError, "lazily conjugated or negated"),
    "transposed": (lambda: torch.ones(3, 4).t(), ValueError, "expected a contiguous tensor"),
    "expanded": (lambda: torch.ones(1, 4).expand(3, 4), ValueError, "expected a contiguous tensor"),
    "heads first": (
        lambda: torch.ones(3, 4, 8).transpose(0, 1),
        ValueError,
        r"strides \[8, 32, 1\]; pass x.contiguous\(\)",
    ),
    "every other": (lambda: torch.ones(4, 2, 8)[:, :, ::2], ValueError, "expected a contiguous"),
    "misaligned": (lambda: torch.ones(32)[1:], ValueError, "a multiple of 64 bytes, got one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        from_torch("x", make())


def test_fake_tensors_are_refused():
    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(TypeError, match="x: expected a tensor with memory, got a FakeTensor"):
        from_torch("x", fake)


def test_a_device_that_jax_does_not_know_is_refused():
    with pytest.raises(ValueError, match="device: expected one of cpu, cuda, got 'xpu'"):
        devices.jax_device(torch.device("xpu", 0))


@pytest.mark.skipif(
    torch.cuda.is_available() and jax.default_backend() == "gpu", reason="JAX has a GPU"
)
def test_a_gpu_that_jax_does_not_have_is_refused():
    with pytest.raises(ValueError, match="JAX has no gpu"):
        devices.jax_device(torch.device("cuda", 0))


def test_a_gpu_is_found_by_its_index_among_the_visible_ones(monkeypatch):
    """As CUDA_VISIBLE_DEVICES leaves them: JAX's ids may be others."""
    visible = [types.SimpleNamespace(id=10 + n, local_hardware_id=n) for n in (1, 0)]
    monkeypatch.setattr(jax, "local_devices", lambda backend: visible)
    find = devices._jax_device.__wrapped__
    assert [find("cuda", index).id for index in (0, 1, None)] == [10, 11, 10]
    with pytest.raises(ValueError, match="JAX sees 2 cuda devices, and none of index 2"):
        find("cuda", 2)


def test_a_graph_that_is_being_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    dlpack.check_not_capturing(torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="cannot be captured in a CUDA or HIP graph"):
        dlpack.check_not_capturing(torch.device("cuda", 0))


def test_gradients_are_fine_where_none_are_recorded():
    x = torch.ones(16, requires_grad=True)
    with torch.no_grad():
        from_torch("x", x)
    from_torch("x", x.detach())
    with torch.inference_mode():
        made_there = torch.ones(16)
        from_torch("x", made_there)
    from_torch("x", made_there)


def test_the_checks_come_in_their_order():
    """Of two faults the earlier one is named."""
    meta_and_dtype = torch.empty(4, dtype=torch.int64, device="meta")
    with pytest.raises(TypeError, match="got a meta tensor"):
        from_torch("x", meta_and_dtype)
    elsewhere = torch.device("cuda", 3)
    with pytest.raises(TypeError, match="dtype"):
        dlpack.check("x", torch.arange(4), elsewhere)
    with pytest.raises(ValueError, match="x: expected a tensor on cuda:3, as the others, got cpu"):
        dlpack.check("x", torch.ones(4, requires_grad=True), elsewhere)
    gradient_and_negated = torch.ones(4, dtype=torch.complex64, requires_grad=True).conj().imag
    with pytest.raises(NotImplementedError, match="gradient"):
        from_torch("x", gradient_and_negated)
    negated_and_layout = complex_negated()
    assert not negated_and_layout.is_contiguous()
    with pytest.raises(ValueError, match="negated"):
        from_torch("x", negated_and_layout)
    wrong_dtype_and_gradient = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(TypeError, match="dtype"):
        from_torch("x", wrong_dtype_and_gradient)
    gradient_and_layout = torch.ones(3, 4, requires_grad=True).t()
    with pytest.raises(NotImplementedError, match="gradient"):
        from_torch("x", gradient_and_layout)
    layout_and_alignment = torch.ones(33)[1:].view(4, 8).t()
    with pytest.raises(ValueError, match="contiguous"):
        from_torch("x", layout_and_alignment)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(3), "x: expected a concrete JAX array, got ndarray"),
        (jnp.zeros(3, jnp.float16), "expected a dtype that torch has too, got float16"),
    ],
)
def test_refused_on_the_way_back(value, message):
    with pytest.raises(TypeError, match=message):
        to_torch(value)


def test_traced_and_sharded_arrays_are_refused_on_the_way_back():
    def traced(x):
        with pytest.raises(TypeError, match="expected a concrete JAX array"):
            to_torch(x)
        return x

    jax.jit(traced)(jnp.ones(3))
    if len(jax.devices()) > 1:
        mesh = jax.make_mesh((len(jax.devices()),), ("x",))
        spread = jax.device_put(
            jnp.ones(len(jax.devices())),
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")),
        )
        with pytest.raises(TypeError, match="expected an array on one device"):
            to_torch(spread)


@on_each_device
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_memory_lives_until_the_last_reference_goes(order, device):
    x = draw(torch.bfloat16, 16, 2, 64, device=device)
    expected = x.cpu().clone()
    crossed = from_torch("x", x)
    held = [x, crossed, to_torch(crossed)]
    del x, crossed
    for n, index in enumerate(order):
        survivors = [held[i] for i in order[n:]]
        for _ in range(4):  # would take the memory, were it free
            draw(torch.bfloat16, 16, 2, 64, device=device)
        for survivor in survivors:
            if isinstance(survivor, torch.Tensor):
                assert torch.equal(survivor.cpu(), expected)
            else:
                assert_same_bits(expected, survivor)
        del survivors, survivor
        held[index] = None
        gc.collect()


def test_a_tensor_is_let_go_when_jax_has_done_with_it():
    memory = np.ones(4096, np.float32)
    gone = weakref.ref(memory)
    first = -(memory.ctypes.data // 4) % (dlpack.CPU_ALIGNMENT // 4)
    x = torch.from_numpy(memory)[first : first + 1024]
    del memory
    crossed = from_torch("x", x)
    jax.block_until_ready(crossed + 1)
    del x
    gc.collect()
    assert gone() is not None
    del crossed
    gc.collect()
    assert gone() is None


def test_a_tensor_that_only_a_running_program_holds_is_waited_for():
    """As at the end of a process, whose interpreter it must not outlive."""
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x).sum())
    x = torch.full((600, 600), 1e-3)
    jax.block_until_ready(program(from_torch("x", x)))
    lending.wait_for_dropped()
    output = program(from_torch("x", x))
    assert lending.dropped() == 1
    lending.wait_for_dropped()
    assert lending.dropped() == 0
    assert output.is_ready()
    held = from_torch("x", x)
    lending.wait_for_dropped()  # not for arrays that are alive
    assert_same_bits(x, held)
