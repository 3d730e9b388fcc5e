"""Parameter counts: the published numbers, formula against counting, and sizes for a budget."""

import pytest
import torch
import transformers as hf
from transformers import masking_utils

import foreword as fw
import zoo
from foreword.count import counted, fit_budget, formula, num_own, table
from foreword.model.survey import survey
from foreword.space import Count

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
EAGER = {"attn_implementation": "eager"}  # makes its masks without looking at numbers
LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


@pytest.fixture(scope="module")
def layouts():
    """Shapes of the models of the papers, without their numbers."""
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setattr(masking_utils, "find_packed_sequence_indices", lambda *args: None)  # it reads numbers
        models = {
            "smollm2": hf.LlamaForCausalLM(hf.LlamaConfig(**SMOLLM2, **EAGER)),
            "llama-7b": hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA_7B, **EAGER)),
            "bart-large": hf.BartForConditionalGeneration(hf.BartConfig(**EAGER)),
        }
        return {name: survey(model.eval()) for name, model in models.items()}


PUBLISHED = [  # method, LLaMA-7B, SmolLM2-135M
    (fw.PromptTuning(length=10), 40_960, 5_760),
    (fw.PrefixTuning(length=10), 2_621_440, 115_200),
    (fw.DeepPrompt(length=10), 1_310_720, 172_800),
    (fw.ZeroInit(length=10), 1_229_760, 161_532),
    (fw.ZeroInitNonlinear(length=10), 2_669_568, 380_732),
    (fw.ParallelAdapter(bottleneck=30, site="attention"), 7_864_320, 1_036_800),
    (fw.ParallelAdapter(bottleneck=30, site="attention", bias=True, norm="in"), None, 1_089_540),
    (fw.MultiheadAdapter(bottleneck=30), 7_864_320, 1_036_800),
    (fw.Lora(r=8), 4_194_304, 460_800),
    (fw.IA3(), 614_400, 57_600),
    (fw.Vera(r=128), 270_336, 30_720),
    (fw.LlamaAdapterV2(length=0, norms=False), 2_719_744, 311_040),
    (fw.LlamaAdapterV2(length=0), 2_719_744 + 266_240, 311_040 + 35_136),
    (fw.PrefixMemory(), 16_777_216, 1_105_920),
]


@pytest.mark.parametrize(("method", "llama", "smollm2"), PUBLISHED, ids=lambda value: getattr(value, "name", None))
def test_decoders(layouts, method, llama, smollm2):
    assert formula(method, layouts["smollm2"]).trainable == smollm2
    if llama is not None:
        assert formula(method, layouts["llama-7b"]).trainable == llama


def test_a_reparameterisation_trains_more_than_it_stores(layouts):
    assert formula(fw.PrefixTuning(length=10, reparam="shared", hidden=512), layouts["smollm2"]) == Count(
        6_210_944, 115_200
    )
    bart = formula(fw.PrefixTuning(length=30, reparam="shared", hidden=800), layouts["bart-large"])
    assert (round(bart.trainable / 1e6, 1), round(bart.stored / 1e6, 2)) == (61.6, 2.21)


@pytest.mark.parametrize(
    ("method", "percent"),
    [
        (fw.PrefixTuning(length=200), 3.63),
        (fw.PrefixTuning(length=30), 0.54),  # printed as 0.1 %, which forgets the three attentions of a layer
        (fw.ParallelAdapter(bottleneck=30, site="attention"), 0.54),
        (fw.ParallelAdapter(bottleneck=200), 2.42),
        (fw.ParallelAdapter(bottleneck=512), 6.19),
        (fw.ParallelAdapter(bottleneck=1024), 12.39),
        (fw.Lora(r=102, targets="ffn"), 6.17),
        (fw.Mam(), 6.74),
    ],
    ids=repr,
)
def test_percentages_of_bart_large(layouts, method, percent):
    layout = layouts["bart-large"]
    assert round(num_own(layout.model) / 1e6, 2) == 406.29
    assert round(100 * formula(method, layout).stored / num_own(layout.model), 2) == percent


def test_mam_on_bart_large_to_the_number(layouts):
    assert formula("mam", layouts["bart-large"]).stored == 27_377_664


@pytest.mark.parametrize("architecture", zoo.ZOO)
def test_formula_and_counting_agree(architecture):
    model = zoo.make(architecture)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    rows = table(model)
    assert [row.method.name for row in rows] == list(fw.methods())
    for row in rows:
        if row.refusal is None:
            assert row.formula == row.counted, row.method
            assert row.share == row.counted.trainable / num_own(model)
    assert sum(row.refusal is None for row in rows) > 10
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


VARIANTS = [
    fw.PrefixTuning(length=3, reparam="per-layer", hidden=5),
    fw.PrefixTuning(length=3, frozen_tokens=1, layers=2),
    fw.ZeroInitNonlinear(length=3, form="deepshare", layers=2),
    fw.ParallelAdapter(bottleneck=3, scale="learned", norm="out", bias=True),
    fw.ParallelAdapter(bottleneck=3, site="attention", output="projected"),
    fw.SequentialAdapter(bottleneck=3, site="houlsby", norm="in", bias=False),
    fw.MultiheadAdapter(bottleneck=3, heads="key-value"),
    fw.MultiheadAdapter(bottleneck=3, heads="query", reparam="shared", hidden=5),
    fw.Lora(r=3, targets="all"),
    fw.Vera(r=3, targets="query+output"),
    fw.LlamaAdapterV2(scaling="input", early=2, length=3),
    fw.UniPELT(length=3, reparam=None, bottleneck=3, r=2),
]


@pytest.mark.parametrize("method", VARIANTS, ids=repr)
@pytest.mark.parametrize("architecture", ["llama", "qwen3-wide-heads", "gpt2", "bart"])
def test_formula_and_counting_agree_for_other_fields(architecture, method):
    model = zoo.make(architecture)
    by_counting = counted(method, model)
    adapter = fw.attach(model, method)
    assert formula(method, adapter.host.layout) == by_counting == Count(adapter.num_trainable, adapter.num_stored)


@pytest.mark.parametrize("name", [name for name, method in fw.methods().items() if method.size])
def test_a_budget_is_met_as_closely_as_the_size_allows(name):
    model = zoo.make("llama")
    method = fit_budget(name, model, 200_000)
    size = getattr(method, method.size)
    assert counted(method, model).trainable <= 200_000
    larger = fw.methods()[name]().at_size(size + 1)
    assert counted(larger, model).trainable > 200_000
    assert not hasattr(model, "foreword")


def test_a_composition_keeps_its_proportion():
    assert fw.Mam(length=30, bottleneck=512).at_size(128) == fw.Mam(length=8, bottleneck=128)
    smaller = fw.UniPELT(length=10, hidden=512, bottleneck=48, r=8).at_size(12)
    assert smaller == fw.UniPELT(length=2, hidden=128, bottleneck=12, r=2)


def test_a_budget_counts_from_the_frozen_tokens():
    method = fit_budget(fw.PrefixTuning(frozen_tokens=1), zoo.make("llama"), 2_000)
    assert method.frozen_tokens == 1
    assert method.length > 1


def test_a_budget_below_the_smallest_size_is_refused():
    with pytest.raises(fw.ForewordError, match="full trains at least 27,360 parameters on this model, more than 1,000"):
        fit_budget("full", zoo.make("llama"), 1_000)
    with pytest.raises(fw.ForewordError, match="no method 'loraa'"):
        fit_budget("loraa", zoo.make("llama"), 1_000)


def test_an_unnamed_point_has_no_formula():
    point = fw.Point(fw.sources.Direct(length=3), fw.combines.ZeroGate())
    model = zoo.make("llama")
    with pytest.raises(fw.ForewordError, match="no formula"):
        formula(point, survey(model))
    assert counted(point, model).trainable == 3 * (2 * 3 * 2 * 8 + 4)
