import pytest

from tests.checkpoint.architectures import MODELS, SHARD_SIZES


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A function: the folder of one of MODELS, made by ``save_pretrained``, and the model."""
    transformers = pytest.importorskip("transformers")
    made = {}

    def save(name):
        if name not in made:
            config_class, arguments = MODELS[name]
            config = getattr(transformers, config_class)(**arguments)
            multimodal = "vision_config" in arguments
            kind = "AutoModelForImageTextToText" if multimodal else "AutoModelForCausalLM"
            model = getattr(transformers, kind).from_config(config)
            for part, parameter in model.named_parameters():
                if part.endswith(".gate.weight"):  # as they are published
                    parameter.data = parameter.data.to(model.dtype)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder, max_shard_size=SHARD_SIZES.get(name, "5GB"))
            made[name] = folder, model
        return made[name]

    return save
