"""The known properties of torch's operators: whether a result can be a new storage."""

from __future__ import annotations

from typing import Any

from torch._C import DispatchKey

#: Results lie in the inputs' storages: never looked at.
VIEW = 0
#: Writes into its inputs and leaves their storages as they are.
IN_PLACE = 1
#: New storages.
FRESH = 2
#: Can be either, or can resize.
EITHER = 3
#: The arguments go into a process group.
SENDS = 4
#: Returns its input, of which the fake kernel makes a copy.
WAIT = 5
#: Copies its second argument into its first.
COPY = 6
#: New storages with the first argument's values.
DUPLICATE = 7
#: Storages made in Python, or mapped from a file.
FOREIGN = 8

# Views that their schemas do not declare.
_UNDECLARED = ("aten._unsafe_view", "aten.unsafe_split", "aten.unsafe_chunk")

#: Kind and name of the operators met so far, and each itself, so that its id stays its own: their
#: hash is computed in Python.
KNOWN: dict[int, tuple[int, str, Any]] = {}


def learn(operator: Any) -> tuple[int, str, Any]:
    """Kind (one of the above), name and ``operator``, from now on in :data:`KNOWN`."""
    name = str(operator)
    KNOWN[id(operator)] = learned = (_kind(operator, name), name, operator)
    return learned


def _kind(operator: Any, name: str) -> int:
    if name.startswith("prim."):
        return VIEW  # asks for a device or a layout; the dispatcher does not know it
    if name.startswith("_c10d_functional.wait_tensor"):
        return WAIT
    if name.startswith(("c10d.", "_c10d_functional.")):
        return SENDS
    if name.startswith(("aten.copy_.", "aten._foreach_copy_.")):
        return COPY
    if name.startswith(("aten.clone.", "aten._to_copy.")):
        return DUPLICATE
    if name.startswith(_UNDECLARED):
        return EITHER
    if name.startswith(("aten.lift_fresh", "aten.set_.", "aten.from_file.")):
        return FOREIGN  # the first is declared as a view: what torch.tensor made
    aliases = [result.alias_info for result in operator._schema.returns]
    # reshape and its like reach a mode in inference mode only; they say "view" and may copy.
    if operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        return EITHER
    if not any(aliases):
        return FRESH
    if not all(aliases):
        return EITHER
    if not any(alias.is_write for alias in aliases):
        return VIEW
    stays = name.split(".")[1].endswith("_") and not name.startswith("aten.resize_")
    return IN_PLACE if stays else EITHER
