"""Memory of messages: used again, and never while somebody reads it."""

import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.server.transport.memory import ALIGNMENT, SMALL, BufferPool, with_huge_pages


def place(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("size", [10, SMALL, SMALL + 5])
def test_buffers_have_their_size_and_jax_takes_them_without_a_copy(size):
    buffer = BufferPool().take(size)
    assert (buffer.size, place(buffer) % ALIGNMENT) == (size, 0)
    assert jnp.from_dlpack(buffer).unsafe_buffer_pointer() == place(buffer)


def test_a_buffer_is_used_again_when_no_array_lies_in_it():
    pool = BufferPool()
    first = place(pool.take(2 * SMALL))
    assert place(pool.take(2 * SMALL)) == first
    assert place(pool.take(SMALL)) == first


@pytest.mark.parametrize(
    "hold",
    [
        lambda buffer: buffer[10:20],
        lambda buffer: buffer.view(np.float32).reshape(-1, 64)[3:4],
        lambda buffer: [np.asarray(buffer[:8])],
        lambda buffer: memoryview(buffer)[4:],
        jnp.from_dlpack,
    ],
)
def test_a_buffer_that_anything_lies_in_is_left_alone(hold):
    pool = BufferPool()
    buffer = pool.take(SMALL)
    first, held = place(buffer), hold(buffer)
    del buffer
    other = pool.take(SMALL)
    assert place(other) != first
    del held
    assert place(pool.take(SMALL)) == first


@pytest.mark.parametrize(("first", "second"), [(SMALL, 3 * SMALL), (8 * SMALL, SMALL)])
def test_a_buffer_has_the_size_of_the_messages(first, second):
    pool = BufferPool()
    pool.take(first)
    assert pool.take(second).size == second
    (buffer,) = pool._buffers
    assert len(buffer) < 1.1 * second


def test_a_choice_for_malloc_stands():
    assert with_huge_pages({}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    one = {"GLIBC_TUNABLES": "glibc.malloc.check=3"}
    both = "glibc.malloc.check=3:glibc.malloc.hugetlb=1"
    assert with_huge_pages(one) == {"GLIBC_TUNABLES": both}
    assert with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == {}
