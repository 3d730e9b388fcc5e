"""Ways to generate that conformance doesn't list: all see the logits of a whole forward."""

import pytest
import torch

import conformance

WAYS = {
    "prompt lookup": {"prompt_lookup_num_tokens": 2},  # several tokens a step, and a cache that is cut back
    "chunked prefill": {"prefill_chunk_size": 3},
    "hidden states": {"output_hidden_states": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["prefix-tuning", "zero-init", "prompt-tuning", "deep-prompt"])
@pytest.mark.parametrize("architecture", ["llama", "mistral-window", "gpt_oss", "gpt2"])
def test_the_logits_are_those_of_a_whole_forward(architecture, method, way):
    case = conformance.fresh_case(architecture, method)
    ids = conformance.text(batch=1)
    with torch.no_grad():
        case.assert_greedy(ids, *case.decode(ids, **WAYS[way]))


@pytest.mark.parametrize("method", ["prefix-tuning", "zero-init", "prompt-tuning", "deep-prompt"])
def test_in_inference_mode(method):
    case = conformance.fresh_case("llama", method)
    ids = conformance.text()
    with torch.inference_mode():
        inside = case.generate(ids)
    assert torch.equal(inside, case.generate(ids))
    case.logits(ids).pow(2).mean().backward()  # what was computed inside is not kept for training


@pytest.mark.parametrize("architecture", ["bart", "t5", "whisper"])
def test_encoder_outputs_that_were_computed_before(architecture):
    """The encoder's own prefixes act when it runs, alone or within `generate`."""
    case = conformance.fresh_case(architecture, "prefix-tuning")
    ids = conformance.text()
    expected = case.generate(ids)
    inputs = case.encoder_inputs(len(ids))
    states = case.model.get_encoder()(**inputs)
    known = {key: value for key, value in inputs.items() if key == "attention_mask"}
    out = case.model.generate(
        encoder_outputs=states, decoder_input_ids=ids, max_new_tokens=conformance.NEW, do_sample=False, **known
    )
    assert torch.equal(out[:, -conformance.NEW :], expected)
