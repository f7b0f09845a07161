"""Where a model's weights lie: a folder on disk, filled from the Hub if need be."""

from pathlib import Path

from offplan.checkpoint.model import Model
from offplan.errors import InputError


def find_weights(model: Model) -> Path:
    """Return the folder that holds a model's shards, fetched from the Hub if need be.

    Raises InputError for a model known from its config alone.
    """
    source = Path(model.source)
    if source.is_dir():
        return source
    shards = {t.shard for layer in model.layers for p in layer.parameters for t in p.tensors}
    shards |= {tensor.shard for tensor in model.outside}
    files = sorted(shard for shard in shards if shard is not None)
    if not files or source.exists():
        raise InputError(
            f"{model.source} has no weights: name a folder that has with --model, or run on "
            "random ones with --dummy-weights"
        )
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model.source, revision=model.revision, allow_patterns=[*files]))
