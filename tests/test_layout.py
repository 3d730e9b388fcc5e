"""What the survey finds in each architecture, against what its configuration says."""

import pytest
import torch

import foreword as fw
import zoo
from conformance import close, text
from foreword.attention.readers import Recorder
from foreword.model.survey import survey
from surroundings import State

# (H, G, D_k, D_v) of every self-attention, where it is not (4, 2, 8, 8)
HEADS = {
    "qwen3-wide-heads": (4, 2, 16, 16),
    "deepseek_v3": (4, 4, 12, 6),
    "t5-wide-heads": (4, 4, 12, 12),
    **dict.fromkeys(
        ["gpt2", "gptj", "codegen", "gpt_neox", "opt", "t5", "bart", "whisper", "bert", "roberta"], (4, 4, 8, 8)
    ),
}
LAYERS = {"qwen3_next": [1, 2], "lfm2": [1, 2], "jamba": [1]}
STATEFUL = {"qwen3_next", "lfm2", "jamba", "falcon_h1"}
SEQ2SEQ = {"t5", "t5-wide-heads", "bart", "whisper"}
ENCODERS = {"bert", "roberta"}
LOOKS_POSITIONS_UP = {"gpt2", "opt", "gptj", "codegen"}  # the last two to rotate by them
POST_NORM = {"bart", *ENCODERS}
SCALES_ITS_INPUT = {"falcon_h1"}  # a factor between the norm and the attention
UNROTATED = {*LOOKS_POSITIONS_UP, *SEQ2SEQ, *ENCODERS, "jamba"}


@pytest.fixture(params=zoo.ZOO)
def architecture(request):
    return request.param


@pytest.fixture
def model(architecture):
    return zoo.make(architecture)


def test_what_the_survey_finds(architecture, model):
    layout = survey(model)
    kinds = {"self", "cross", "encoder"} if architecture in SEQ2SEQ else {"self"}
    assert set(layout.kinds) == kinds
    layers = LAYERS.get(architecture, [0, 1] if architecture in SEQ2SEQ else [0, 1, 2])
    for sites in layout.kinds.values():
        assert [site.layer for site in sites] == layers
    for site in layout.sites:
        heads = (site.num_heads, site.num_key_value_heads, site.key_dim, site.value_dim)
        assert heads == HEADS.get(architecture, (4, 2, 8, 8))
        assert site.hidden_size == 32
        assert model.get_submodule(site.path) is site.module
        assert site.label == f"{site.kind}.{site.layer}"
    assert layout.stateful == (architecture in STATEFUL)
    assert layout.decoder_only == (architecture not in SEQ2SEQ | ENCODERS)
    assert layout.absolute_positions == (architecture in LOOKS_POSITIONS_UP)
    assert layout.rotates == (architecture not in UNROTATED)
    assert len(layout.stacks) == 1 + (architecture in SEQ2SEQ)
    skipped = [path.rsplit(".", 1)[1] for path in layout.skipped]
    assert skipped == [str(layer) for layer in range(3) if architecture in LAYERS and layer not in layers]


def test_surveying_changes_nothing(model):
    model.train()
    before = State.of(model)
    survey(model)
    after = State.of(model)
    assert after.modules == before.modules
    assert (after.trainable, after.hooks, after.training) == (before.trainable, before.hooks, before.training)
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())


@torch.no_grad()
def test_project_makes_the_keys_and_values_of_the_model(architecture, model):
    """From the layer's own input, through its norm where it has one, at the text's positions."""
    layout = survey(model)
    if not layout.decoder_only:
        pytest.skip("checked on decoders")
    ids = text(batch=1)
    recorder, inputs = Recorder(), {}
    for site in layout.sites:
        site.layer_module.register_forward_pre_hook(
            lambda module, args, kwargs, site=site: inputs.update({site: [*args, *kwargs.values()][0]}),
            with_kwargs=True,
        )
    model(ids, use_cache=False, foreword=recorder)
    for site in layout.sites:
        if architecture in SCALES_ITS_INPUT:
            assert not site.reads_layer_input
            continue
        assert site.reads_layer_input
        key, value = site.project(inputs[site][0], torch.arange(ids.shape[1]), norm=True)
        close(key, recorder.calls[site.module][1][0])
        close(value, recorder.calls[site.module][2][0])


def test_norms_in_front_of_the_attention(architecture, model):
    """Pre-norm layers have one that they read the layer's input through; post-norm layers read it as it is."""
    for site in survey(model).sites:
        if site.kind != "cross":
            assert (site.norm is None) == (architecture in POST_NORM | SCALES_ITS_INPUT)


@pytest.mark.parametrize("architecture", zoo.UNREACHABLE)
def test_unreachable_attention(architecture):
    with pytest.raises(fw.ForewordError, match="AttentionInterface") as error:
        survey(zoo.make(architecture))
    assert "\n" not in str(error.value)


def test_a_wrapper_around_the_model_is_no_matter():
    """Sites are labelled by kind and layer, so a bare stack and a model with a head have the same names."""
    whole, bare = zoo.make("llama"), zoo.make("llama").model
    assert [site.label for site in survey(whole).sites] == [site.label for site in survey(bare).sites]
