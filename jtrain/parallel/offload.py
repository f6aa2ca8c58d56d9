"""Offload of state to the memory of the host between steps, with the sharding of the devices."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import NamedSharding

from jtrain.core.pytree import name
from jtrain.errors import ShardingError
from jtrain.parallel.devices import Device

Offload: TypeAlias = tuple[Literal["params", "opt_state", "activations"], ...]
HOST = "pinned_host"  # the memory kind that devices access directly


def offload_shardings(shardings: Any, tree: Any, offload: Offload) -> Any:
    """Return `shardings` of a state with the parts in `offload` in the memory of the host.

    Scalars stay on the devices: they take no memory, and each would be a transfer.
    """

    def leaf(path: tuple, sharding: NamedSharding, array: Any) -> NamedSharding:
        offloaded = is_offloaded(name(path), array.ndim, offload)
        return sharding.with_memory_kind(HOST) if offloaded else sharding

    return jax.tree_util.tree_map_with_path(leaf, shardings, tree)


def is_offloaded(leaf: str, ndim: int, offload: Offload) -> bool:
    """Return whether this leaf of a state is offloaded."""
    return leaf.split("/")[0] in offload and ndim > 0


def to_device(tree: Any, abstract_state: Any) -> Any:
    """Move the leaves of `tree` that `abstract_state` has on the host to the devices.

    `abstract_state` has a sharding at each leaf. Inside a jitted function the compiler moves them.
    """
    return jax.tree.map(
        lambda x, leaf: jax.device_put(x, _on_device(leaf)) if is_on_host(leaf) else x,
        tree,
        abstract_state,
    )


def device_shardings(abstract_state: Any) -> Any:
    """Return `abstract_state` with the shardings of `to_device`."""
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_on_device(leaf))
            if is_on_host(leaf)
            else leaf
        ),
        abstract_state,
    )


def host_avals(abstract: Any, shardings: Any) -> Any:
    """Return shapes and dtypes; leaves on the host have a sharding, as part of their type."""

    def aval(x, sharding):
        if sharding.memory_kind != HOST:
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)

    return jax.tree.map(aval, abstract, shardings)


def with_offload(step: Callable[[Any, Any], tuple[Any, Any]], abstract_state: Any) -> Callable:
    """Return `step(state, batch) -> (state, anything)` for a state placed as `abstract_state`.

    The program itself moves each leaf to the devices and back, so that the compiler overlaps
    transfers with computation. Without offloaded leaves `step` is returned unchanged.
    """
    if not any(map(is_on_host, jax.tree.leaves(abstract_state))):
        return step

    def offloaded(state: Any, batch: Any) -> tuple[Any, Any]:
        state, rest = step(to_device(state, abstract_state), batch)
        back = lambda x, leaf: jax.device_put(x, leaf.sharding) if is_on_host(leaf) else x
        return jax.tree.map(back, state, abstract_state), rest

    return offloaded


def remat_policy(names: Sequence[str], offload: Offload) -> Callable[..., Any]:
    """Return the policy of `jax.checkpoint` that saves these names, on the device or the host."""
    if "activations" not in offload:
        return jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst=HOST,
    )


def check_offload_saves(offload: Offload, saved: Sequence[str]) -> None:
    """Raise, after a loss was traced, if activations are offloaded and none is saved by name.

    Raises:
        ShardingError: with the settings that save some.
    """
    if "activations" in offload and not saved:
        raise ShardingError(
            "parallel.offload=[activations] moves activations that a model saves by name for the "
            "backward pass, and this model saves none by name. Set model.remat=names and "
            "model.saved=[qkv, attention] (of a transformer), or leave `activations` out."
        )


def check_host_memory(device: Device, offload: Offload) -> None:
    """Raise if `offload` is set and the device cannot access the memory of its host.

    Raises:
        ShardingError: with settings that need less memory instead.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if offload and HOST not in kinds:
        raise ShardingError(
            f"parallel.offload=[{', '.join(offload)}] needs the memory of the host, and "
            f"{device.device_kind} devices reach {', '.join(kinds) or 'none'} and no {HOST}. Take "
            f"parallel.offload=[] and split the state instead (parallel.kind=fsdp), or "
            f"recompute activations (model.remat=full)."
        )


def is_on_host(leaf: Any) -> bool:
    """Return whether a leaf is in the memory of the host, where no arithmetic is possible."""
    return getattr(leaf.sharding, "memory_kind", None) == HOST


def _on_device(leaf: Any) -> NamedSharding:
    return NamedSharding(leaf.sharding.mesh, leaf.sharding.spec)
