"""What an export's own files say about texts, compared with what the run says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.app.export_proof import check_generation
from phalanx.data.tokenizers import HuggingFaceTokenizer, train_bpe_tokenizer
from phalanx.train.hf.reload import TextFacts, compare_text, compute_scores

transformers: Any = pytest.importorskip("transformers")

BEGIN = "<s>"
WITH_BEGIN, WITHOUT = f"{BEGIN} $A", "$A"


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    train_bpe_tokenizer(iter(["to be or not to be"] * 9), 270, tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def tokenizer_that_begins(vocabulary: Path, single: str, chat_template: str | None = None) -> Any:
    """A tokenizer of transformers that puts `single` around each text."""
    import tokenizers.processors

    library = tokenizers.Tokenizer.from_file(str(vocabulary))
    library.add_special_tokens([BEGIN])
    number = library.token_to_id(BEGIN)
    library.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=[(BEGIN, number)])
    library.save(str(vocabulary))
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(vocabulary), bos_token=BEGIN)
    made.chat_template = chat_template
    return made


def failed(vocabulary: Path, single: str, template: str | None = None, run_template: str | None = None) -> list[str]:
    """The checks that fail for a run whose tokens begin with BEGIN, and an export with this tokenizer."""
    tokenizer_that_begins(vocabulary, WITH_BEGIN)
    own = HuggingFaceTokenizer(vocabulary)
    texts = ["to be", "or not <|endoftext|> é"]
    facts = TextFacts(
        texts, [own.encode_prompt(text) for text in texts], list(own.begin_tokens), [0], [0], run_template or template
    )
    exported = tokenizer_that_begins(vocabulary, single, template)
    return [check.name for check in compare_text(facts, exported) if not check.passed]


def test_a_tokenizer_like_the_runs_passes(vocabulary: Path) -> None:
    assert failed(vocabulary, WITH_BEGIN, "{{ bos_token }}{{ messages[0]['content'] }}") == []


@pytest.mark.parametrize("single", [WITHOUT, f"{BEGIN} {WITH_BEGIN}"], ids=["never", "twice"])
def test_a_begin_that_is_missing_or_there_twice_fails(vocabulary: Path, single: str) -> None:
    assert failed(vocabulary, single) == ["tokenizer", "begin of text"]


def test_a_dialogue_that_begins_twice_fails(vocabulary: Path) -> None:
    assert failed(vocabulary, WITH_BEGIN, "{{ bos_token }}{{ bos_token }}x") == ["begin of text"]


def test_another_chat_template_or_none_fails(vocabulary: Path) -> None:
    assert failed(vocabulary, WITH_BEGIN, "{{ messages }}", run_template="{{ other }}") == ["chat template"]
    assert failed(vocabulary, WITH_BEGIN, None, run_template="{{ other }}") == ["chat template"]


class Successor(nn.Module):
    """Takes the token after each for the most likely, and the one after that for as likely behind token 5."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = nn.functional.one_hot((tokens + 1) % 10, 12).float()
        scores[tokens == 5, 7] = 1.0
        return scores


@pytest.mark.parametrize(
    ("tokens", "passed", "found"),
    [
        ([4, 5, 6], True, "3 of 3 tokens of 1 prompts are ours; 0 reached their end"),
        ([4, 5, 7, 8, 9], True, "1 reached their end"),  # 6 and 7 are as likely
        ([4, 6], False, "prompt 1: token 2 is 6, ours is 5"),
        ([4, 5, 6, 7, 8, 9, 0], False, "continues behind token 9"),
    ],
)
def test_generation_is_compared_token_by_token(tokens: list[int], passed: bool, found: str) -> None:
    check = check_generation(Successor(), [([2, 3], tokens)], {9}, 1e-4)
    assert (check.passed, found in check.found) == (passed, True), check


def test_hidden_states_stand_for_logits_of_a_model_without_an_output_layer() -> None:
    class Encoder(nn.Module):
        def forward(self, tokens: torch.Tensor) -> Any:
            return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=tokens[..., None].float())

    scores, has_logits = compute_scores(Encoder(), torch.tensor([[1, 2], [3, 4]]))
    assert (scores.flatten().tolist(), has_logits) == ([1.0, 2.0, 3.0, 4.0], False)
