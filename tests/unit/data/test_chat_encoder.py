"""Conversations as tokens: what is in the loss under templates of several families, and which records are refused."""

import json

import numpy as np
import pytest

from phalanx.data.chat import ChatEncoder, ChatPlan
from phalanx.data.chat_template import ChatTemplate, TemplateRenderer, load_chat_template
from phalanx.data.inspection import show_marked_tokens
from phalanx.data.manifest import LOSS_BIT, REJECTED_BIT, SEQUENCE_BIT, TOKEN_MASK
from phalanx.data.rows import BadRowError
from phalanx.data.tokenizers import HuggingFaceTokenizer
from phalanx.errors import RecipeError
from phalanx.recipe.data_schema import ChatConfig

tokenizers = pytest.importorskip("tokenizers")
CONTROL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<s>{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{{ '<|im_start|>' if m.role == 'assistant' }}{{ m.content }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]<|im_end|>{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": "<|im_end|>"}'}}],
}
DATED = "{{ strftime_now('%d %b %Y') }} " + CHATML
TURNS = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "second"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=CONTROL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["one two first second assistant user"] * 4, trainer)
    (folder / "tokenizer.json").write_text(made.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": CHATML}))
    return HuggingFaceTokenizer(folder / "tokenizer.json")


def encode(tokenizer, record, template=CHATML, **config):
    plan = ChatPlan(ChatConfig(**config), ChatTemplate(template, special_tokens={"eos_token": "</s>"}))
    return ChatEncoder(ChatPlan.from_json(plan.to_json()), tokenizer).encode(record)


def trained_texts(tokenizer, document):
    """The pieces of a document that are in the loss, as text, control tokens in their names."""
    return [
        text.replace("⟦", "").replace("⟧", "") for text, in_loss in show_marked_tokens(tokenizer, document) if in_loss
    ]


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (CHATML, ["first<|im_end|>", "second<|im_end|>"]),
        (LLAMA, ["first<|eot_id|>", "second<|eot_id|>"]),
        (MISTRAL, [" first</s>", " second</s>"]),
        (TAGGED, ["first<|im_end|>", "second<|im_end|>"]),
        (OPENED, ["first<|im_end|>", "second<|im_end|>"]),
        (MARKED, ["<|im_start|>first<|eot_id|>", "<|im_start|>second<|eot_id|>"]),
    ],
    ids=["chatml", "llama", "mistral", "generation-tags", "prompt-opens-reasoning", "prompt-ends-in-another-token"],
)
def test_answers_and_their_ends_of_turn_are_in_the_loss(tokenizer, template, trained):
    [document] = encode(tokenizer, {"messages": TURNS}, template)
    assert trained_texts(tokenizer, document) == trained


def test_tokens_are_those_of_the_rendered_text(tokenizer):
    [document] = encode(tokenizer, {"messages": TURNS}, LLAMA)
    rendered = TemplateRenderer(ChatTemplate(LLAMA)).render(TURNS).text
    assert (document & TOKEN_MASK).tolist() == tokenizer.encode_marked(rendered)[0]
    assert (document & SEQUENCE_BIT != 0).nonzero()[0].tolist() == [0]


def test_a_template_that_drops_earlier_reasoning_gives_a_sequence_for_each_answer(tokenizer):
    turns = [{**turn, "reasoning_content": "hm"} if turn["role"] == "assistant" else turn for turn in TURNS]
    documents = encode(tokenizer, {"messages": turns}, REASONING)
    assert [trained_texts(tokenizer, document) for document in documents] == [
        ["<think>hm</think>first<|im_end|>"],
        ["<think>hm</think>second<|im_end|>"],
    ]
    [document] = encode(tokenizer, {"messages": turns}, REASONING, reasoning="drop")
    assert trained_texts(tokenizer, document) == ["first<|im_end|>", "second<|im_end|>"]


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [("last", ["second<|im_end|>"]), ("assistant", ["first<|im_end|>", "second<|im_end|>"])],
)
def test_train_on_chooses_the_messages(tokenizer, train_on, trained):
    [document] = encode(tokenizer, {"messages": TURNS}, train_on=train_on)
    assert trained_texts(tokenizer, document) == trained


def test_train_on_all_has_every_token_in_the_loss(tokenizer):
    [document] = encode(tokenizer, {"messages": TURNS}, train_on="all")
    assert (document & LOSS_BIT != 0).all()


def test_names_of_control_tokens_in_a_message_are_text(tokenizer):
    messages = [{"role": "user", "content": "what is <|im_end|>?"}, {"role": "assistant", "content": "</s> ends"}]
    end = tokenizer.encode_marked("<|im_end|>")[0][0]
    [document] = encode(tokenizer, {"messages": messages})
    assert (document & TOKEN_MASK == end).sum() == 2  # the ends of the turns
    assert tokenizer.decode((document & TOKEN_MASK).tolist()).count("<|im_end|>?") == 1
    [allowed] = encode(tokenizer, {"messages": messages}, allow_special_tokens=True)
    assert (allowed & TOKEN_MASK == end).sum() == 3


def test_the_begin_of_text_stands_once(tokenizer, tmp_path):
    folder = tmp_path / "with-begin"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer._json)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    begins = HuggingFaceTokenizer(folder / "tokenizer.json")
    for template in (CHATML, LLAMA):  # without and with <s>
        [document] = encode(begins, {"messages": TURNS}, template)
        tokens = (document & TOKEN_MASK).tolist()
        assert (tokens[0], tokens.count(0)) == (0, 1)


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "first"}]},
        {"prompt": [{"role": "user", "content": "one?"}], "completion": [{"role": "assistant", "content": "first"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one?"}]}, TURNS[1]]},
        {"messages": [{"role": "user", "content": "one?", "tool_calls": None}, TURNS[1]]},
    ],
    ids=["sharegpt", "prompt-messages", "parts", "nulls-of-a-table"],
)
def test_forms_of_records_give_the_same_tokens(tokenizer, record):
    [document], [expected] = encode(tokenizer, record), encode(tokenizer, {"messages": TURNS[:2]})
    np.testing.assert_array_equal(document, expected)


def test_a_completion_of_plain_text_ends_with_the_end_of_text(tokenizer):
    [document] = encode(tokenizer, {"prompt": "one two ", "completion": "first"})
    assert trained_texts(tokenizer, document) == ["first</s>"]


def test_tools_and_calls_reach_the_template_as_objects(tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = (
        "{{ tools[0].name }}\n{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.a }}{{ c.function | tojson }}{% endfor %}<|im_end|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    [document] = encode(tokenizer, {"messages": messages, "tools": [{"name": "add"}]}, template)
    assert trained_texts(tokenizer, document) == ['1{"name": "add", "arguments": {"a": 1}}<|im_end|>']


def test_names_of_control_tokens_in_tools_and_calls_are_text(tokenizer):
    template = (
        "{{ tools }}{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{{ m.tool_calls }}<|im_end|>"
        "{% endfor %}"
    )
    record = {"messages": [TURNS[0], CALLING], "tools": [{"name": "add", "description": "adds <|im_start|>"}]}
    [document] = encode(tokenizer, record, template)
    tokens = (document & TOKEN_MASK).tolist()
    ids = tokenizer._tokenizer.get_vocab()
    assert (tokens.count(ids["<|im_start|>"]), tokens.count(ids["<|im_end|>"])) == (2, 2)
    assert tokenizer.decode(tokens).count("<|im_end|>") == 3


def test_a_pair_is_one_document_of_two_sequences(tokenizer):
    [document] = encode(tokenizer, {"prompt": "one?", "chosen": TURNS[1:2], "rejected": TURNS[3:]}, records="pairs")
    rejected = document & REJECTED_BIT != 0
    starts = (document & SEQUENCE_BIT != 0).nonzero()[0].tolist()
    assert len(starts) == 2
    assert rejected.tolist() == [False] * starts[1] + [True] * (len(document) - starts[1])
    assert trained_texts(tokenizer, document) == ["first<|im_end|>", "second<|im_end|>"]


def test_a_label_marks_an_answer(tokenizer):
    for label in (True, False):
        [document] = encode(tokenizer, {"messages": TURNS[:2], "label": label}, records="labels")
        assert (document & REJECTED_BIT != 0).all() == (not label)


@pytest.mark.parametrize(
    ("record", "template", "named"),
    [
        ({"text": "plain"}, CHATML, "`messages`, `conversations`, or `prompt` and `completion`"),
        ({"messages": [{"role": "robot", "content": "x"}, TURNS[1]]}, CHATML, "messages[0].role: found 'robot'"),
        ({"messages": [{"role": "system", "content": "x"}, TURNS[1]]}, CHATML, "a user and then an assistant"),
        ({"messages": [TURNS[0], {"role": "assistant", "content": " "}]}, CHATML, "the assistant's message is empty"),
        ({"messages": [TURNS[0], {"role": "user", "content": [{"type": "image"}]}, TURNS[1]]}, CHATML, "type image"),
        ({"messages": TURNS}, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "learn to stop"),
        ({"messages": TURNS}, ENDLESS, "learn to stop"),
        ({"messages": TURNS}, DATED, "give one, such as data.chat.date: 2026-01-31"),
        ({"messages": [TURNS[0], CALLING]}, CHATML, "messages[1].tool_calls: the chat template leaves them out"),
        ({"messages": TURNS}, "{{ raise_exception('no system') }}", "the chat template fails: no system"),
        ({"messages": TURNS}, "{{ messages[0].content.missing.deeper }}", "the chat template fails"),
    ],
    ids=[
        "no-messages",
        "role",
        "no-user",
        "empty",
        "image",
        "no-end-of-turn",
        "control-token-before-only",
        "date",
        "calls",
        "refused",
        "undefined",
    ],
)
def test_records_that_cannot_be_trained_on_are_refused(tokenizer, record, template, named):
    with pytest.raises(BadRowError) as raised:
        encode(tokenizer, record, template)
    assert named in str(raised.value)


def test_a_template_is_found_beside_the_tokenizer_or_named(tokenizer, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(RecipeError, match="has no chat template"):
        load_chat_template(None, folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "chat_template": [{"name": "default", "template": LLAMA}]})
    )
    assert load_chat_template(None, folder) == ChatTemplate(LLAMA, special_tokens={"eos_token": "</s>"})
    (folder / "chat_template.jinja").write_text(CHATML)
    assert load_chat_template(None, folder).text == CHATML
    (folder / "own.jinja").write_text("{% for %}")
    with pytest.raises(RecipeError, match="not a Jinja template, line 1"):
        load_chat_template(folder / "own.jinja", folder)


def test_a_template_writes_the_date_that_is_given(tokenizer):
    [document] = encode(tokenizer, {"messages": TURNS}, DATED, date="2026-01-31")
    assert tokenizer.decode((document & TOKEN_MASK).tolist()).startswith("31 Jan 2026 ")


def test_a_template_cannot_reach_python(tokenizer):
    with pytest.raises(BadRowError, match="unsafe"):
        encode(tokenizer, {"messages": TURNS}, "{{ messages.__class__.__mro__ }}")
