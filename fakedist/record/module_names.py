"""Names of modules: the fully qualified name that the model's author would use, whatever wraps the module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from fakedist.record.unseen import Unseen
from fakedist.rundir.rows import LayerRow

#: Attributes in which torch.compile, activation checkpointing and FSDP1 keep what they wrap. DDP's is "module".
_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
#: Layer 0; and the layer of a parameter that none owns, or of a mark that keeps the layer that allocated a block.
OUTSIDE, KEEP_LAYER = 0, -1


def class_name(module: nn.Module) -> str:
    """Name of the module's class, or of the author's class if FSDP2 made a subclass of it."""
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule) and (scripted := getattr(module, "original_name", "")):
        return str(scripted)
    if (
        cls.__name__.startswith("FSDP") and len(cls.__bases__) == 2
    ):  # fully_shard: type("FSDP" + name, (FSDPModule, cls))
        cls = cls.__bases__[1]
    return cls.__name__


def _is_wrapper(module: nn.Module) -> bool:
    names = list(module._modules.keys())  # TorchScript's mapping cannot be iterated
    return len(names) == 1 and (names[0] in _WRAPPED or (names[0] == "module" and not module._parameters))


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside any wrappers."""
    while _is_wrapper(module) and (inner := next(iter(module._modules.values()))) is not None:
        module = inner
    return module


def modules_of(root: nn.Module) -> list[nn.Module]:
    """A module and all below it, in the order of ``nn.Module.modules()``, which takes three times as long."""
    modules: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in modules:
            modules[id(module)] = module
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return list(modules.values())


class Owners:
    """The layer that owns each parameter. A parameter that is gone has no owner, even if another has its ``id``."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for reference, layer in list(self._layers.values()):
            if (parameter := reference()) is not None:
                yield parameter, layer

    def own(self, parameter: torch.Tensor, layer: int) -> None:
        """Make a layer the owner of a parameter."""
        self._layers[id(parameter)] = (weakref.ref(parameter), layer)

    def forget(self, parameter: torch.Tensor) -> None:
        """Hold no reference to a parameter."""
        self._layers.pop(id(parameter), None)

    def owner(self, parameter: torch.Tensor | None) -> int:
        """The layer that owns a parameter, or ``KEEP_LAYER``."""
        known = self._layers.get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else KEEP_LAYER

    def of(self, parameters: Iterable[object]) -> list[int]:
        """The layer that owns each parameter, or ``KEEP_LAYER``."""
        known = self._layers.get
        return [
            owned[1] if (owned := known(id(it))) is not None and owned[0]() is it else KEEP_LAYER for it in parameters
        ]

    def owner_of_node(self, node: object) -> int:
        """The layer of the parameter to which an AccumulateGrad node adds."""
        return max(OUTSIDE, self.owner(getattr(node, "variable", None)))


class LayerTable:
    """Numbers layers and knows each module's name.

    Layer 0 is outside any module. A root module is called ``(ClassName)``; its children's names are relative to it, and
    below a second root start with its name, so no two layers share one. The model that trains takes the short names
    from one that ran before (``name_first``). A model that ran alone and then as a part of another is renamed:
    ``(Backbone).0`` becomes ``backbone.0``. A layer keeps its number. Of a module's several names, the one under the
    calling layer is used.

    An unregistered module made inside another's forward, or without parameters, is named under its caller:
    ``layers.0.(Softmax)``. All modules of one class made there, step after step, are one layer.
    """

    def __init__(self) -> None:
        self.rows = [LayerRow(OUTSIDE, "", "", -1)]
        self.owners = Owners()
        self._written = 0
        self._renamed: list[int] = []
        self._ids: dict[str, int] = {"": OUTSIDE}
        self._names: list[str] = [""]
        self._of_module: dict[int, tuple[weakref.ref[nn.Module], tuple[int, ...]]] = {}
        self._parents: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = {}
        self._roots: dict[int, weakref.ref[nn.Module]] = {}
        self._labels: dict[str, weakref.ref[nn.Module]] = {}
        self._first_label = ""
        self._made: dict[int, weakref.ref[nn.Module]] = {}
        self._called: set[int] = set()

    def new_rows(self) -> list[LayerRow]:
        """The rows since the last call, and those that were given before and have new names."""
        rows = [*map(self.rows.__getitem__, self._renamed), *self.rows[self._written :]]
        self._renamed, self._written = [], len(self.rows)
        return rows

    def name(self, layer: int) -> str:
        """The name of a layer."""
        return self._names[layer]

    def roots(self) -> list[nn.Module]:
        """The root modules that are alive, in the order in which they were first seen."""
        return [module for reference in self._roots.values() if (module := reference()) is not None]

    def layer(self, module: nn.Module, calling: int = OUTSIDE) -> int:
        """The layer of a module, called from the layer ``calling``."""
        known = self._of_module.get(id(module))
        if known is None or known[0]() is not module:
            top = self._top_of(module)
            if calling != OUTSIDE and self._is_callers(top):
                return self._layer_under(calling, module, top)
            self._name_everything_from(top)
            known = self._of_module.get(id(module))
            if known is None or known[0]() is not module:  # the parent that registered it has dropped it
                self._name_everything_from(module)
                known = self._of_module[id(module)]
        layers = known[1]
        if len(layers) == 1:
            return layers[0]
        if calling in layers:  # the end of its forward
            return calling
        prefix = self._names[calling]
        return next((layer for layer in layers if prefix and self._names[layer].startswith(prefix + ".")), layers[0])

    def name_first(self, module: nn.Module) -> None:
        """Give the short names to the model with this module, and longer ones to the model that had them."""
        top = self._top_of(module)
        inner = unwrapped(top)  # it may have run before it was wrapped
        root = self._of_module[id(inner)][1][0] if self.knows(inner) else OUTSIDE
        before, last = self._ids.get(self._first_label, OUTSIDE), self._labels.get(self._first_label)
        own = f"({class_name(inner)})"
        is_free = own == self._first_label and (last is None or last() is None)  # it will get the dead model's names
        if before in (OUTSIDE, root) or self.rows[root].parent > OUTSIDE or (root == OUTSIDE and is_free):
            return
        label = self._first_label
        if root != OUTSIDE:
            own = self._names[root]
            swapped = self.rows[root].class_name == self.rows[before].class_name
            label, own = (own, label) if swapped else (label, own)
        elif own == label:
            label = self._free_label(self.rows[before].class_name)
        if last is not None:
            self._labels.pop(self._first_label)
            self._labels[label] = last
        if root != OUTSIDE:
            self._labels[own] = weakref.ref(inner)
        self._rename({before: (label, label)} | ({root: (own, "")} if root != OUTSIDE else {}))
        self._first_label = own if root != OUTSIDE else ""

    def _rename(self, new: dict[int, tuple[str, str]]) -> None:
        """Give each of these roots a new name, and what is below it another prefix: ``new`` has both, "" for none."""
        old = {root: f"{self._names[root]}." for root in new}
        for row in self.rows[1:]:
            root = row
            while root.layer not in new and root.parent > OUTSIDE:
                root = self.rows[root.parent]
            if root.layer not in new:
                continue
            own, prefix = new[root.layer]
            below = row.name.removeprefix(old[root.layer])
            if below.startswith("("):  # the root calls it and does not have it: "(GPT).(Softmax)"
                prefix = own
            name = own if row is root else f"{prefix}.{below}" if prefix else below
            self._replace(row._replace(name=name))
        self._ids = {name: layer for layer, name in enumerate(self._names)}

    def _replace(self, row: LayerRow) -> None:
        self.rows[row.layer], self._names[row.layer] = row, row.name
        if row.layer < self._written:
            self._renamed.append(row.layer)

    def layer_by_id(self, key: int, calling: int = OUTSIDE) -> int | None:
        """The layer of the module with this ``id()``. None if no live module is known by it."""
        for known in (self._of_module.get(key), self._parents.get(key)):
            if known is not None and (module := known[0]()) is not None:
                return self.layer(module, calling)
        return None

    def moved(self, layer: int, origin: int, target: int) -> int:
        """The layer with the relative name below ``target`` that ``layer`` has below ``origin``, or else ``layer``."""
        below: list[str] = []
        at = layer
        while at not in (origin, OUTSIDE):
            below.insert(0, self._names[at].rpartition(".")[2])
            at = self.rows[at].parent
        if at != origin:
            return layer
        above = "" if below and self._names[target] == self._first_label else self._names[target]
        return self._ids.get(".".join([above, *below] if above else below), target)

    def remember_parent(self, parent: nn.Module, child: nn.Module) -> None:
        """Remember that ``parent`` has registered ``child``."""
        self._parents[id(child)] = (weakref.ref(child), weakref.ref(parent))

    def knows(self, module: nn.Module) -> bool:
        """Return whether a module ran or is part of one that did."""
        known = self._of_module.get(id(module))
        return known is not None and known[0]() is module

    def copy(self, name: str, of_class: str) -> int:
        """The layer of a copy of a model that never ran. It has its own name."""
        return self._number(name, of_class, "")

    def remember_made(self, module: nn.Module) -> None:
        """Remember that ``module`` was made or changed inside another module's forward."""
        self._made[id(module)] = weakref.ref(module)

    def _is_callers(self, top: nn.Module) -> bool:
        """Return whether an unregistered module belongs to its caller: made there, or without parameters."""
        known, made = self._of_module.get(id(top)), self._made.get(id(top))
        if known is not None and known[0]() is top:
            return False
        if made is not None and made() is top:
            return True
        return not any(module._parameters or module._buffers for module in top.modules())

    def _layer_under(self, calling: int, module: nn.Module, top: nn.Module) -> int:
        """The layer of a module in the tree of ``top``, which the layer ``calling`` runs or is itself."""
        row = calling
        while row not in self._called and row != OUTSIDE:
            row = self.rows[row].parent
        of_class = class_name(unwrapped(top))
        if row == OUTSIDE or self.rows[row].class_name != of_class:
            name = f"{self._names[calling]}.({of_class})"
            row = self._number(name, of_class, self._names[calling])
            self._called.add(row)
        own_layer = row
        for name, inner in _named(top):
            if name:
                full = f"{self._names[row]}.{name}"
                layer = self._number(full, class_name(unwrapped(inner)), full.rpartition(".")[0])
                own_layer = layer if inner is module else own_layer
        return own_layer

    def _top_of(self, module: nn.Module) -> nn.Module:
        seen = {id(module)}
        while (entry := self._parents.get(id(module))) is not None and entry[0]() is module:
            parent = entry[1]()
            if parent is None or id(parent) in seen or module not in parent._modules.values():
                break
            seen.add(id(parent))
            module = parent
        return module

    def _name_everything_from(self, root: nn.Module) -> None:
        named = list(_named(root))
        parts = {id(part): self._take_label(part) for name, part in named if name and self._is_root(part)}
        top = self._label_of(unwrapped(root))
        prefix = "" if top == self._first_label else top
        layers_of_module: dict[int, tuple[nn.Module, list[int]]] = {}
        for name, module in named:
            full = f"{prefix}.{name}" if prefix and name else name or top
            parent = "" if not name else full.rpartition(".")[0] or top
            ran_as = parts.pop(id(unwrapped(module)), OUTSIDE)
            if ran_as != OUTSIDE and full not in self._ids:
                self._rename({ran_as: (full, full)})
                self._replace(self.rows[ran_as]._replace(parent=self._ids[parent]))
            layer = self._number(full, class_name(unwrapped(module)), parent)
            layers = layers_of_module.setdefault(id(module), (module, []))[1]
            if layer not in layers:
                layers.append(layer)
        for key, (module, layers) in layers_of_module.items():
            self._of_module[key] = (weakref.ref(module), tuple(layers))
        self._roots = {key: ref for key, ref in self._roots.items() if key not in layers_of_module}
        self._roots[id(root)] = weakref.ref(root)

    def _is_root(self, module: nn.Module) -> bool:
        label = self._labels.get(self._names[self._of_module[id(module)][1][0]]) if self.knows(module) else None
        return label is not None and label() is module

    def _take_label(self, part: nn.Module) -> int:
        """Release the label of a root that turned out to be a part of another model, and return its layer."""
        layer = self._of_module[id(part)][1][0]
        self._labels.pop(self._names[layer], None)
        if self._names[layer] == self._first_label:
            self._rename({layer: (self._first_label, self._first_label)})
            self._first_label = ""
        return layer

    def _label_of(self, root: nn.Module) -> str:
        label = self._free_label(class_name(root), root)
        self._labels[label] = weakref.ref(root)
        self._first_label = self._first_label or label
        return label

    def _free_label(self, of_class: str, root: nn.Module | None = None) -> str:
        """The label for a root of this class: one that it has, or the first that no other model has."""
        label, count = f"({of_class})", 1
        while label in self._labels and self._labels[label]() not in (root, None):
            count += 1
            label = f"({of_class}#{count})"
        return label

    def _number(self, name: str, of_class: str, parent: str) -> int:
        layer = self._ids.get(name)
        if layer is None:
            layer = self._ids[name] = len(self.rows)
            self.rows.append(LayerRow(layer, name, of_class, self._ids.get(parent, OUTSIDE)))
            self._names.append(name)
        return layer


def _named(root: nn.Module, name: str = "", path: tuple[int, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Every module below ``root`` with every name it has, parents first. A wrapper adds nothing to a name."""
    yield name, root
    wrapper = _is_wrapper(root)
    for child_name, child in root._modules.items():
        if child is None or id(child) in path:
            continue
        below = name if wrapper else f"{name}.{child_name}" if name else child_name
        yield from _named(child, below, (*path, id(root)))


@contextmanager
def remember_parents(
    table: LayerTable, in_forward: Callable[[], bool] = lambda: False, unseen: Unseen | None = None
) -> Iterator[None]:
    """Report every registered module to ``table``, so that names are known before the model first runs.

    Modules that get their parts while ``in_forward()`` are reported as made. ``unseen`` hides the hooks from Dynamo.
    """

    def registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            table.remember_parent(parent, child)
            got_a_part(parent)

    def got_a_part(module: nn.Module, *_: object) -> None:
        if not torch.compiler.is_compiling() and in_forward():
            table.remember_made(module)

    unseen = unseen or Unseen()
    with ExitStack() as stack:
        stack.callback(unseen.add(nn_module.register_module_module_registration_hook(registered)))
        stack.callback(unseen.add(nn_module.register_module_parameter_registration_hook(got_a_part)))
        stack.callback(unseen.add(nn_module.register_module_buffer_registration_hook(got_a_part)))
        yield
