"""What lies in the memory of the host between steps: sharded there as it is on the devices."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import NamedSharding

from jtrain.core.pytree import name
from jtrain.errors import ShardingError
from jtrain.parallel.devices import Device

Offload: TypeAlias = tuple[Literal["params", "opt_state", "activations"], ...]
HOST = "pinned_host"  # the kind of memory that devices read and write by themselves


def offload_shardings(shardings: Any, tree: Any, offload: Offload) -> Any:
    """`shardings` of a state, those parts of it that `offload` names in the memory of the host.

    Single numbers stay on the devices: they take no room, and each would be a transfer.
    """

    def leaf(path: tuple, at: NamedSharding, array: Any) -> NamedSharding:
        moved = is_offloaded(name(path), array.ndim, offload)
        return at.with_memory_kind(HOST) if moved else at

    return jax.tree_util.tree_map_with_path(leaf, shardings, tree)


def is_offloaded(leaf: str, ndim: int, offload: Offload) -> bool:
    """Whether this leaf of a state does."""
    return leaf.split("/")[0] in offload and ndim > 0


def to_device(tree: Any, like: Any) -> Any:
    """`tree`, whose leaves lie as those of `like` say, all of it on the devices.

    `like` has a sharding at each leaf. Inside a jitted function the compiler does it there.
    """
    return jax.tree.map(
        lambda x, of: jax.device_put(x, _near(of)) if is_on_host(of) else x, tree, like
    )


def device_shardings(like: Any) -> Any:
    """`like`, as `to_device` leaves it."""
    return jax.tree.map(
        lambda of: (
            jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=_near(of)) if is_on_host(of) else of
        ),
        like,
    )


def host_avals(abstract: Any, shardings: Any) -> Any:
    """Shapes and dtypes; where one lies on the host its sharding, too: there it is of its type."""
    told = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at, weak_type=x.weak_type)
    return jax.tree.map(
        lambda x, at: told(x, at) if at.memory_kind == HOST else x, abstract, shardings
    )


def with_offload(step: Callable[[Any, Any], tuple[Any, Any]], like: Any) -> Callable:
    """`step(state, batch) -> (state, anything)`; before and after, the state lies as `like` says.

    Each leaf is brought to the devices and put back by the program itself, so the compiler does so
    beside what it computes. A step that has nothing on the host is given back as it is.
    """
    if not any(map(is_on_host, jax.tree.leaves(like))):
        return step

    def rested(state: Any, batch: Any) -> tuple[Any, Any]:
        state, rest = step(to_device(state, like), batch)
        back = lambda x, of: jax.device_put(x, of.sharding) if is_on_host(of) else x
        return jax.tree.map(back, state, like), rest

    return rested


def remat_policy(names: Sequence[str], offload: Offload) -> Callable[..., Any]:
    """What `jax.checkpoint` keeps for the backward pass: what has these names, here or there."""
    if "activations" not in offload:
        return jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst=HOST,
    )


def check_offload_saves(offload: Offload, saved: Sequence[str]) -> None:
    """Checks, once a loss was traced, that something is saved by name if it shall be offloaded.

    Raises:
        ShardingError: with the settings that do.
    """
    if "activations" in offload and not saved:
        raise ShardingError(
            "parallel.offload=[activations] moves what a model saves by name for the backward "
            "pass, and this one saves nothing by name. Set model.remat=names and "
            "model.saved=[qkv, attention] (of a transformer), or leave `activations` out."
        )


def check_host_memory(device: Device, offload: Offload) -> None:
    """Checks that devices such as this one reach the memory of their host.

    Raises:
        ShardingError: with what splits the state further instead.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if offload and HOST not in kinds:
        raise ShardingError(
            f"parallel.offload=[{', '.join(offload)}] keeps that in the memory of the host, and "
            f"{device.device_kind} devices reach {', '.join(kinds) or 'none'} and no {HOST}. Take "
            f"parallel.offload=[] and split the state instead (parallel.kind=fsdp), or compute "
            f"more once again (model.remat=full)."
        )


def is_on_host(leaf: Any) -> bool:
    """Whether a leaf lies in the memory of the host, where no arithmetic is done."""
    return getattr(leaf.sharding, "memory_kind", None) == HOST


def _near(leaf: Any) -> NamedSharding:
    return NamedSharding(leaf.sharding.mesh, leaf.sharding.spec)
