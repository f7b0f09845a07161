"""Changes to the graph of a compiled step, by which it takes fewer launches.

A model's modules are called one by one, each with a launch of its own. In the graph that
torch.compile makes of a layer it is seen which of them read the same inputs:

- Products of the same rows by several weights become one launch, of the weights where they lie.
- Very few rows are multiplied by weights in their values by our own kernel, which adds biases, too.
- What a router's kernel has sorted is not sorted again.

Prompts and large batches have more rows than this asks for, and keep their graph.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from offplan import kernel_sizes
from offplan.kernel_sizes import JOINED_ROWS, KERNEL_TYPES

DEVICES = ("cuda",)
"""Types of devices that kernels run on."""
Node = Any
"""A node of a graph; what its arguments are its operator says."""
_TYPES = tuple(getattr(torch, name) for name in KERNEL_TYPES)
_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default, torch.ops.aten._unsafe_view.default)
_LAID_OUT = (_ATEN.permute.default, _ATEN.clone.default)


class FewerLaunches(CustomGraphPass):
    """Changes a layer's graph before torch's compiler makes kernels of it."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph of aten operators and our own."""
        from offplan.runtime.forms import operators  # needs triton, and registers operators

        reuse_order(graph)
        # what is left without a use has no effect, and makes no kernel
        for nodes in list(_alike(graph, "multiply")):
            _join_codes(graph, nodes, operators)
        for nodes in list(_alike(graph, "values")):
            _join_values(graph, nodes)

    def uuid(self) -> Any:
        """Return what torch's cache of compiled graphs tells this pass from others by."""
        # need triton; a graph that the cache has is not changed again, and calls our operators
        from offplan.runtime.forms import operators, products, value_kernels

        files = (kernel_sizes, operators, products, value_kernels)
        names = (__file__, *(str(each.__file__) for each in files))
        return get_hash_for_files(names, extra=repr(kernel_sizes.FEW_ROWS))


def reuse_order(graph: fx.Graph) -> None:
    """Take the order of pairs from the kernel that chose experts, where both are of the same."""
    for node in _calls(graph, "sort_pairs"):
        chosen, num_experts = node.args
        source: Any = _source(chosen)
        if not _is(source, "getitem", 1) or not _is(source.args[0], "choose_experts"):
            continue
        router = source.args[0]
        is_all = _value(chosen).numel() == _value(source).numel()
        if not is_all or _value(router.args[0]).shape[1] != num_experts:
            continue
        for user in list(node.users):
            with graph.inserting_before(user):
                made = _item(graph, router, user.args[1] + 2)
            user.replace_all_uses_with(made)
            graph.erase_node(user)
        graph.erase_node(node)


def _join_codes(graph: fx.Graph, nodes: list[Node], operators: Any) -> None:
    """Multiply the rows of several products by codes in one launch."""
    first = nodes[0]
    names, block, _, (x,), _ = first.args
    tensors = [tensor for node in nodes for tensor in node.args[2]]
    given = names, block, tensors, len(nodes)
    values = names, block, [_value(each) for each in tensors], len(nodes)
    if not operators.can_join(*values, _value(x)):
        return
    _replace(graph, nodes, torch.ops.offplan.multiply_together.default, (*given, x))


def _join_values(graph: fx.Graph, nodes: list[Node]) -> None:
    """Multiply very few rows by weights in their values in one launch."""
    weights = [_weight(node) for node in nodes]
    biases = [node.args[0] for node in nodes if node.target is _ATEN.addmm.default]
    x = nodes[0].args[-2]
    _replace(graph, nodes, torch.ops.offplan.multiply_few.default, (x, weights, biases))


def _replace(graph: fx.Graph, nodes: list[Node], target: Any, arguments: Any) -> None:
    """Put one operator in the place of products, which lie in what it returns one by one."""
    shapes = [_value(node).shape for node in nodes]
    fake = _value(nodes[0])
    with graph.inserting_before(nodes[0]):
        flat = graph.call_function(target, arguments)
        flat.meta["val"] = fake.new_empty(sum(shape.numel() for shape in shapes))
        begin, made = 0, []
        for shape in shapes:
            end, part = begin + shape.numel(), flat
            if len(nodes) > 1:
                part = graph.call_function(_ATEN.slice.Tensor, (flat, 0, begin, end))
                part.meta["val"] = fake.new_empty(shape.numel())
            made.append(graph.call_function(_ATEN.view.default, (part, list(shape))))
            made[-1].meta["val"] = fake.new_empty(shape)
            begin = end
    for node, each in zip(nodes, made, strict=True):
        node.replace_all_uses_with(each)
        graph.erase_node(node)


def _alike(graph: fx.Graph, kind: str) -> Iterator[list[Node]]:
    """Yield products that may become one operator, those of the same rows together, in order.

    Weights and biases are the graph's inputs, so that all of them are there when the first is
    multiplied.
    """
    groups: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        key = _key_of_codes(node) if kind == "multiply" else _key_of_values(node)
        if key is not None:
            groups.setdefault(key, []).append(node)
    for nodes in groups.values():
        if len(nodes) > 1 or (kind == "values" and _is_faster_alone(nodes[0])):
            yield nodes


def _is_faster_alone(node: Node) -> bool:
    """Return True if our own kernel multiplies by one weight's values sooner than a library."""
    from offplan.runtime.forms.value_kernels import is_small

    return len(_value(node.args[-2])) == 1 or is_small(_value(_weight(node)))


def _key_of_codes(node: Node) -> Any:
    """Return what products by codes have in common that may be one; None for anything else."""
    if not _is(node, "multiply"):
        return None
    names, block, tensors, inputs, in_place = node.args
    if len(inputs) != 1 or in_place or not all(map(_is_input, tensors)):
        return None
    if _value(inputs[0]).shape[-2] > JOINED_ROWS:
        return None
    return names, tuple(block), _same_rows(inputs[0])


def _key_of_values(node: Node) -> Any:
    """Return what products of very few rows by values have in common that may be one, or None."""
    if node.target not in (_ATEN.mm.default, _ATEN.addmm.default) or node.kwargs:
        return None
    weight, x = _weight(node), node.args[-2]
    if weight is None:
        return None
    values, rows = _value(weight), _value(x)
    is_known = values.device.type in DEVICES and values.is_contiguous() and values.dtype in _TYPES
    if not is_known or rows.dtype is not values.dtype or len(rows) not in kernel_sizes.FEW_ROWS:
        return None
    has_bias = node.target is _ATEN.addmm.default
    if has_bias:
        bias = node.args[0]
        own = _value(bias)
        if not _is_input(bias) or own.shape != values.shape[:1] or own.dtype is not values.dtype:
            return None
    from offplan.runtime.forms.value_kernels import is_small

    return _same_rows(x), has_bias, is_small(values), values.dtype


def _weight(node: Node) -> Any:
    """Return the input of the graph, [out, in], that a product's second factor is a view of."""
    factor: Any = node.args[-1]
    if (
        factor.target is _ATEN.permute.default and list(factor.args[1]) == [1, 0]
    ) or factor.target is _ATEN.t.default:
        source = factor.args[0]
    else:
        return None
    return source if _is_input(source) else None


def _same_rows(x: Node) -> Any:
    """Return what two inputs have in common that hold the same rows, laid out alike."""
    if x.target in _VIEWS:
        source = _source(x)
        return "view", tuple(_value(x).shape), _same_rows(source)
    if x.target in _LAID_OUT:
        return x.target, repr(x.args[1:]), repr(x.kwargs), _same_rows(x.args[0])
    return x


def _source(node: Any) -> Any:
    while node.target in _VIEWS:
        node = node.args[0]
    return node


def _is_input(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _calls(graph: fx.Graph, name: str) -> list[Node]:
    return [node for node in graph.nodes if _is(node, name)]


def _is(node: Any, name: str, index: int | None = None) -> bool:
    """Return True if a node calls our operator of this name, or takes so an item of a tuple.

    Modules that no model needs were never imported, and have registered none.
    """
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if index is not None:
        return bool(node.target is operator.getitem and node.args[1] == index)
    registered = getattr(torch.ops.offplan, name, None)
    return registered is not None and node.target is registered.default


def _item(graph: fx.Graph, node: Node, index: int) -> Node:
    made = graph.call_function(operator.getitem, (node, index))
    made.meta["val"] = node.meta["val"][index]
    return made
