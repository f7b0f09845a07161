"""The stored tensors that go to each parameter of the model, by transformers' own mapping."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from math import prod

from transformers import PreTrainedModel

from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.quantise import describe_unread
from offplan.forms.form import Component, Kind
from offplan.forms.recognise import FEW_BITS
from offplan.held.stage import Stage
from offplan.runtime.loading.target import Source
from offplan.runtime.refusal import refuse
from offplan.transformers_private import WeightConverter, rename

Renamed = tuple[str, str | None, WeightConverter | None]
"""A parameter's name, the converter's pattern that a stored tensor's name has, and that."""


@dataclass(frozen=True)
class Gathered:
    """The sources of one part of one parameter, and what transformers converts them by."""

    name: str
    """The parameter's name in the model as it was built."""
    converter: WeightConverter | None
    """Converter of the tensors; None if they are renamed and no more."""
    sources: list[Source] = field(default_factory=list)

    @property
    def parameter(self) -> Parameter:
        """The first parameter of the checkpoint that goes there; the others have its form."""
        return self.sources[0].parameter

    @property
    def part(self) -> Component:
        """The part that all sources are."""
        return self.sources[0].part


def list_sources(stage: Stage) -> list[Source]:
    """List what a stage holds of a text's model, part by part.

    Raises CheckpointError for codes that the config does not explain.
    """
    quantisation, source = stage.model.architecture.quantisation, stage.model.source
    if quantisation is not None and not quantisation.is_known:
        # nor may values that are stored as they are be all that is multiplied
        raise refuse(f"{source}: {describe_unread(quantisation)}")
    sources = [*_walk(stage)]
    coded = next((each.parameter for each in sources if each.stores_codes), None)
    if coded is not None and quantisation is None:
        raise refuse(f"{source} stores {coded.name} as codes that its config does not explain")
    return sources


def _walk(stage: Stage) -> Iterator[Source]:
    layers = {
        id(parameter): index
        for index, layer in enumerate(stage.layers)
        for parameter in layer.parameters
    }
    for parameter in stage.parameters:
        for part in parameter.components:
            tensors = parameter.of(part)
            of_values = parameter.made_of or [None] * len(tensors)
            for tensor, value in zip(tensors, of_values, strict=True):
                yield Source(tensor, parameter, part, layers.get(id(parameter)), value)


def gather(
    skeleton: PreTrainedModel, sources: Sequence[Source], state: Container[str]
) -> tuple[list[Gathered], list[Source]]:
    """Gather sources by the parameter, of those in ``state``, that they go to.

    A weight's parts go where its values would. Returns also the sources that go nowhere. Raises
    CheckpointError for forms that are not understood, and for matrices of several forms in one.
    """
    gathered: dict[tuple[str, Component], Gathered] = {}
    unused: list[Source] = []
    for source, (name, pattern, converter) in zip(sources, _rename(skeleton, sources), strict=True):
        if name not in state:
            unused.append(source)
            continue
        _check_understood(name, source.parameter)
        one = gathered.setdefault((name, source.part), Gathered(name, converter))
        one.sources.append(source._replace(pattern=pattern or ""))
        if one.parameter.form != source.parameter.form:
            raise refuse(
                f"{name} joins matrices stored as {one.parameter.form.label} and "
                f"{source.parameter.form.label}"
            )
    return [*gathered.values()], unused


def _rename(skeleton: PreTrainedModel, sources: Sequence[Source]) -> Iterator[Renamed]:
    """Yield where each source goes: of the experts of one parameter, where the first and last do.

    An expert's name differs from another's by its index alone. transformers takes up to 0.1 ms for
    one, which is seconds for 60 layers of 256 experts.
    """
    alike = [[*each] for _, each in groupby(sources, lambda each: (id(each.parameter), each.part))]
    ends = [(each[0].name_of_values, each[-1].name_of_values) for each in alike]
    renamed = rename(skeleton, [name for pair in ends for name in pair])
    for group, (first, last) in zip(alike, zip(renamed, renamed, strict=True), strict=True):
        if first == last:
            yield from repeat(first, len(group))
        else:
            yield from rename(skeleton, [each.name_of_values for each in group])


def _check_understood(name: str, parameter: Parameter) -> None:
    """Raise CheckpointError, which lists what was found, for what is sized and not understood."""
    if parameter.form.kind is Kind.OTHER:
        codes, *beside = (parameter.of(part)[0] for part in parameter.components)
        found = ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in (codes, *beside))
        what = "what fits no known form, or not the one that its config says"
        bits = 8 * codes.nbytes // max(1, prod(parameter.shape))
        if codes.dtype == "I32" and bits in FEW_BITS:
            what = f"whole numbers of {bits} bits, and kernels are for 4 and 8"
        raise refuse(f"{name} is stored as {what}: {found}")
