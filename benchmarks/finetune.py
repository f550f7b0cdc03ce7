"""Fine-tuning: are losses and gradients those of TRL, what does each do with awkward inputs, and how fast are both?

    python benchmarks/finetune.py [--out docs/benchmarks/finetune.md] [--rounds 3] [--steps 4]
    python benchmarks/finetune.py --tables sft dpo ...      # only these, which are added to the file

TRL is measured where it is installed (`pip install trl==1.16.0`); without it its cells are empty. Three parts:

    parity        a tiny random Llama in fp32 and the same records: loss, norm of the gradient, and the largest
                  |difference of a parameter's gradient| / |gradient|, by TRL's own trainer (its collator and
                  `compute_loss`) or, where that trains from generations, by its loss function
    correctness   each cell is computed here from the tokens and labels that a trainer would train on
    speed         a Llama of 4 layers and width 256 with 8,192 tokens in fp32, conversations of about 20 to 250 tokens,
                  about 1,024 of them in a step (4,096 in the last table). Each contender trains in a process of its
                  own with one thread, in turns within each round; medians of rounds. Other programs change the CPU
                  seconds less than tokens/s

"Useful" tokens are those of conversations, without padding. Nothing is asserted.
"""

import argparse
import json
import logging
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from chat_inputs import save_chat_model, write_chat_inputs
from data import cpu_name, installed
from phalanx.autoconfig.choices import choose_without_trials, resolve_recipe
from phalanx.data import RunData, open_data, prepare_all_sources
from phalanx.errors import PhalanxError
from phalanx.recipe import Recipe, ResolvedRecipe
from phalanx.run import Event, Run
from phalanx.run.event_types import StepDone
from phalanx.train.builder import build_context
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.inference import load_trained_model
from phalanx.train.reference import ensure_reference
from phalanx.train.tasks.grpo import Grpo
from phalanx.train.train_context import TrainContext, WorkerProcess
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from small_train import Remembering

BETA, MARGIN = 0.2, 0.5
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML without the new line behind <|im_end|>: TRL would train it, and what is compared are losses of equal masks."""
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_PARITY_RECORDS, PARITY_LENGTH = 8, 128
Values = dict[str, Any]


# ---- ours


def open_our_data(folder: Path, **values: Any) -> tuple[ResolvedRecipe, RunData]:
    """Resolve a recipe of `folder`, and prepare and open its data."""
    fixed = {
        "device": "cpu",
        "num_threads": torch.get_num_threads(),
        "precision": "fp32",
        "model": {"build": "hf:base"},
    }
    fixed |= {"evaluation": {"holdout_fraction": 0.0, "every": None}, "batch": {"global_size": 1, "micro_size": 1}}
    recipe = Recipe.model_validate({**fixed, "steps": 10, **values})
    data, evaluation = prepare_all_sources(recipe.data, recipe.evaluation, folder, folder / "cache")
    recipe = recipe.model_copy(update={"data": data, "evaluation": evaluation})
    resolved = resolve_recipe(recipe, choose_without_trials(recipe, 1, 1, "cpu"), 1)
    return resolved, open_data(resolved.data, resolved.evaluation, resolved.seed)


def open_ours(folder: Path, reporter: Remembering | None = None, **values: Any) -> TrainContext:
    """Build what a worker trains with; a preference has the model as its reference."""
    resolved, run_data = open_our_data(folder, **values)
    run = Run(Path(tempfile.mkdtemp(dir=folder)) / "run")
    run.create()
    context = build_context(WorkerProcess(run, folder, DistEnv(), reporter or Remembering()), resolved, run_data)
    ensure_reference(context, run_data, False)
    return context


def chat_data(source: str, seq_len: int = PARITY_LENGTH, **more: Any) -> Values:
    return {"source": {"jsonl": f"{source}.jsonl"}, "tokenizer": "base", "seq_len": seq_len, **more}


def read_all(data: Any) -> dict[str, Tensor]:
    arrays = data.read_training(0, data.num_train_samples)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


# ---- parity


@dataclass(frozen=True)
class Measured:
    """A loss, and the gradient [parameter name]."""

    loss: float
    gradients: dict[str, Tensor]

    @property
    def norm(self) -> float:
        return float(torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm())

    def difference(self, other: "Measured") -> float:
        """The largest relative difference of a parameter's gradient."""
        pairs = [(gradient, other.gradients[name]) for name, gradient in self.gradients.items()]
        return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def measure_loss(model: nn.Module, loss: Tensor) -> Measured:
    model.zero_grad()
    loss.backward()
    return Measured(
        float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    )


def measure_ours(folder: Path, batch: dict[str, Tensor] | None = None, **values: Any) -> Measured:
    context = open_ours(folder, **values)
    context.model.load_state_dict(load_model(folder / "policy").state_dict())
    assert isinstance(context.loss_module, nn.Module)
    if batch is None:
        batch = read_all(context.data)
        [(_, total, count)] = context.loss_module(batch)
    else:  # of `grpo`: answers that the model gave before
        task = context.loss_module.loss_fn.task
        total, count = task.loss(context.model(batch["tokens"]), batch)
    return measure_loss(context.model, total / count)


def load_model(folder: Path, **config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **config)


def load_tokenizer(folder: Path, template: str = TEMPLATE) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    return tokenizer


def read_records(folder: Path, source: str) -> list[Values]:
    return [json.loads(line) for line in (folder / f"{source}.jsonl").read_text().splitlines()]


def write_records(folder: Path, source: str, records: Sequence[Values]) -> None:
    (folder / f"{source}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def make_peer(
    kind: str,
    folder: Path,
    records: list[Values],
    template: str = TEMPLATE,
    models: tuple[str, str] = ("policy", "base"),
    attention: str = "sdpa",
    tokenizer: str = "base",
    adapter: Any = None,
    **options: Any,
) -> Any:
    """Make TRL's trainer `kind` of records, with a policy and, where it needs one, a reference; `adapter`: PEFT's
    configuration of one."""
    import datasets
    import trl.experimental.cpo
    import trl.experimental.orpo

    owner = {"CPO": trl.experimental.cpo, "ORPO": trl.experimental.orpo}.get(kind, trl)
    values: Values = {"output_dir": tempfile.mkdtemp(dir=folder), "use_cpu": True, "bf16": False, "report_to": "none"}
    values |= {"per_device_train_batch_size": len(records), "max_length": PARITY_LENGTH, "max_steps": 1}
    values |= {"gradient_checkpointing": False, "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    if kind == "GRPO":
        del values["max_length"]
    arguments = getattr(owner, f"{kind}Config")(**{**values, **options})
    more: Values = {"ref_model": load_model(folder / models[1])} if kind in ("DPO", "KTO") else {}
    if kind == "GRPO":
        more = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    if adapter is not None:
        more["peft_config"] = adapter
    return getattr(owner, f"{kind}Trainer")(
        model=load_model(folder / models[0], attn_implementation=attention),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=load_tokenizer(folder / tokenizer, template),
        **more,
    )


def first_batch(trainer: Any) -> Values:
    batch: Values = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return batch


def measure_peer(kind: str, folder: Path, source: str, **options: Any) -> Measured:
    trainer = make_peer(kind, folder, read_records(folder, source), **options)
    trainer.model.train()
    return measure_loss(trainer.model, trainer.compute_loss(trainer.model, first_batch(trainer)))


def measure_peer_orpo_of_answers(folder: Path) -> Measured:
    """TRL's odds ratio and mean log-probabilities, with the cross-entropy of each answer as a mean over its tokens."""
    trainer = make_peer("ORPO", folder, read_records(folder, "pairs"), beta=BETA)
    chosen, rejected, *_ = trainer.concatenated_forward(trainer.model, first_batch(trainer))
    losses, *_ = trainer.odds_ratio_loss(chosen, rejected)
    return measure_loss(trainer.model, -chosen.mean() - losses.mean())


def measure_peer_distillation(folder: Path, beta: float) -> Measured:
    from trl.experimental.gkd import GKDTrainer

    trainer = make_peer("SFT", folder, read_records(folder, "chat"), TAGGED, assistant_only_loss=True)
    batch, teacher = first_batch(trainer), load_model(folder / "teacher")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    student = load_model(folder / "policy")
    with torch.no_grad():
        theirs = teacher(**inputs).logits[:, :-1]
    loss = GKDTrainer.generalized_jsd_loss(student(**inputs).logits[:, :-1], theirs, batch["labels"][:, 1:], beta)
    return measure_loss(student, loss)


def sample_answers(folder: Path) -> dict[str, Tensor]:
    """Answers of the policy to the prompts of the chats, with rewards: a batch of `grpo`."""
    context = open_ours(folder, **GRPO)
    context.model.load_state_dict(load_model(folder / "policy").state_dict())
    assert isinstance(context.loss_module, nn.Module)
    task = context.loss_module.loss_fn.task
    assert isinstance(task, Grpo)
    torch.manual_seed(0)
    return task.roll_out(context.model, read_all(context.data))


def measure_peer_grpo(folder: Path, batch: dict[str, Tensor]) -> Measured:
    prompts, answers = [], []
    for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True):
        at = (targets != -100).nonzero()[:, 0]
        prompts.append(tokens[: int(at[0]) + 1])
        answers.append(targets[at])
    trainer = make_peer("GRPO", folder, [{"prompt": "one"}] * 4, loss_type="dapo", beta=0.0, num_generations=4)
    left, right = pad([prompt.flip(0) for prompt in prompts]), pad(answers)
    inputs = {"prompt_ids": left[0].flip(1), "prompt_mask": left[1].flip(1)}
    inputs |= {"completion_ids": right[0], "completion_mask": right[1], "advantages": batch["advantages"]}
    inputs["num_items_in_batch"] = right[1].sum()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return measure_loss(trainer.model, trainer._compute_loss(trainer.model, inputs))


def pad(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of tokens and their mask [n, s], padded on the right."""
    masks = [torch.ones_like(row) for row in rows]
    ids, mask = (nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (rows, masks))
    return ids, mask


GRPO: Values = {
    "task": {"kind": "grpo", "reward": "chat_rewards:letters", "group_size": 4, "max_new_tokens": 8},
    "data": chat_data("chat"),
}


def preference(loss: str, source: str = "pairs") -> Values:
    return {"task": {"kind": "preference", "loss": loss, "beta": BETA, "margin": MARGIN}, "data": chat_data(source)}


def distillation(divergence: str) -> Values:
    data = chat_data("chat", chat={}, packing="whole", document_masking=True)
    return {"task": {"kind": "distillation", "teacher": "hf:teacher", "divergence": divergence}, "data": data}


def compare(folder: Path) -> Iterator[tuple[str, Measured, Measured | None]]:
    """Each loss with ours and TRL's."""
    sft = {"template": TAGGED, "assistant_only_loss": True}
    packed: Values = {"task": "chat", "data": chat_data("chat")}
    single: Values = {"task": "chat", "data": chat_data("chat", packing="single")}
    answers = sample_answers(folder)
    cpo = {"beta": BETA, "loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": MARGIN}
    rows: list[tuple[str, Callable[[], Measured], Callable[[], Measured]]] = [
        ("SFT, padded", lambda: measure_ours(folder, **single), lambda: measure_peer("SFT", folder, "chat", **sft)),
        (
            "SFT, packed (TRL: bfd)",
            lambda: measure_ours(folder, **packed),
            lambda: measure_peer("SFT", folder, "chat", **sft, packing=True),
        ),
        *(
            (name, lambda loss=loss: measure_ours(folder, **preference(loss)), peer)
            for name, loss, peer in (
                ("DPO", "dpo", lambda: measure_peer("DPO", folder, "pairs", beta=BETA)),
                ("IPO", "ipo", lambda: measure_peer("DPO", folder, "pairs", beta=BETA, loss_type="ipo")),
                ("SimPO", "simpo", lambda: measure_peer("CPO", folder, "pairs", **cpo)),
                ("ORPO, cross-entropy of each answer", "orpo", lambda: measure_peer_orpo_of_answers(folder)),
                ("ORPO, TRL's own cross-entropy", "orpo", lambda: measure_peer("ORPO", folder, "pairs", beta=BETA)),
            )
        ),
        (
            "KTO, reference point 0",
            lambda: measure_ours(folder, **preference("kto", "labels")),
            lambda: measure_peer("KTO", folder, "answers", beta=BETA, loss_type="apo_zero_unpaired"),
        ),
        *(
            (
                f"distillation, {divergence}",
                lambda divergence=divergence: measure_ours(folder, **distillation(divergence)),
                lambda beta=beta: measure_peer_distillation(folder, beta),
            )
            for divergence, beta in (("forward", 0.0), ("reverse", 1.0), ("jsd", 0.5))
        ),
        (
            "GRPO (dapo), given answers",
            lambda: measure_ours(folder, answers, **GRPO),
            lambda: measure_peer_grpo(folder, answers),
        ),
    ]
    for name, ours, peer in rows:
        yield name, ours(), measure_if_installed(peer)


def measure_if_installed(peer: Callable[[], Measured]) -> Measured | None:
    """What a peer returns; None if it is not installed."""
    try:
        return peer()
    except ImportError:
        return None


def write_parity_inputs(folder: Path) -> None:
    write_chat_inputs(folder, NUM_PARITY_RECORDS)
    for number, name in enumerate(("base", "policy", "teacher")):
        save_chat_model(folder / name, seed=number, initializer_range=0.2)
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    write_tokenizer_with_bos(folder)
    labels = [
        {"prompt": record["messages"][:-1], "completion": record["messages"][-1:], "label": record["label"]}
        for record in read_records(folder, "labels")
    ]
    write_records(folder, "answers", labels)
    (folder / "chat_rewards.py").write_text(
        Path(__file__).parents[1].joinpath("tests/helpers/chat_rewards.py").read_text()
    )


# ---- correctness


@dataclass(frozen=True)
class Trained:
    """A sample: its tokens, and which of them are in the loss."""

    ids: list[int]
    in_loss: list[bool]

    def tokens_in_loss(self) -> list[int]:
        return [token for token, is_in in zip(self.ids, self.in_loss, strict=True) if is_in]


Reader = Callable[..., list[Trained]]
"""Takes records, a template and, optionally, the name of a tokenizer."""


def read_ours(
    folder: Path, records: Sequence[Values], template: str, tokenizer: str = "base", **more: Any
) -> list[Trained]:
    """The samples that we train on."""
    write_records(folder, "probe", records)
    (folder / "template.jinja").write_text(template)
    data = chat_data("probe") | {"tokenizer": tokenizer, "chat": {"template": "template.jinja"}, **more}
    batch = read_all(open_our_data(folder, task="chat", data=data)[1])
    samples = []
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        last = max((at for at, target in enumerate(targets) if target != -100), default=len(tokens) - 1)
        samples.append(
            Trained([*tokens[: last + 1], targets[last]], [False, *(each != -100 for each in targets[: last + 1])])
        )
    return samples


def read_peer(
    folder: Path, records: Sequence[Values], template: str, tokenizer: str = "base", **more: Any
) -> list[Trained]:
    """The samples that TRL's SFT trains on: with `assistant_only_loss` where there are messages."""
    only = {"assistant_only_loss": "messages" in records[0], **more}
    trainer = make_peer("SFT", folder, list(records), template, tokenizer=tokenizer, **only)
    return [Trained(row["input_ids"], [label != -100 for label in row["labels"]]) for row in trainer.train_dataset]


def read_axolotl(folder: Path, records: Sequence[Values], template: str, tokenizer: str = "base") -> list[Trained]:
    """The samples that axolotl's `chat_template` strategy makes with its defaults, without those that are too long,
    which it drops."""
    if "messages" not in records[0]:
        raise ImportError("another strategy")
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy

    loaded = load_tokenizer(folder / tokenizer, template)
    prompter = ChatTemplatePrompter(loaded, chat_template=template, max_length=PARITY_LENGTH)
    strategy = ChatTemplateStrategy(
        prompter, loaded, False, PARITY_LENGTH, roles_to_train=["assistant"], train_on_eos="turn"
    )
    rows = [strategy.tokenize_prompt(record) for record in records]
    rows = [row for row in rows if len(row["input_ids"]) <= PARITY_LENGTH]
    return [Trained(row["input_ids"], [label != -100 for label in row["labels"]]) for row in rows]


def chat(*contents: str) -> Values:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]}


def spell(folder: Path, name: str = "base") -> Callable[[str], list[int]]:
    tokenizer = load_tokenizer(folder / name)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def find_answers(ids: list[int], encode: Callable[[str], list[int]]) -> list[int]:
    """The tokens of the assistant's messages, each with its end, found by the words that begin them."""
    header, [end] = encode("<|im_start|>assistant\n"), encode("<|im_end|>")
    size = len(header)
    begins = [at + size for at in range(len(ids)) if ids[at : at + size] == header]
    return [token for begin in begins for token in ids[begin : ids.index(end, begin) + 1]]


def check_mask(folder: Path, read: Reader, template: str = TEMPLATE) -> str:
    [sample] = read([chat("one two", "three", "four five", "six seven")], template)
    expected, trained = find_answers(sample.ids, spell(folder)), sample.tokens_in_loss()
    return "yes" if trained == expected else f"no: {len(trained)} tokens in the loss, {len(expected)} in answers"


def check_stop(folder: Path, read: Reader) -> str:
    template = TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    [sample] = read([chat("one two", "three")], template)
    return "yes" if spell(folder)("<|im_end|>")[0] in sample.tokens_in_loss() else "no"


def check_no_answer(read: Reader) -> str:
    samples = read([{"messages": [{"role": "user", "content": "one two"}]}], TAGGED)
    return f"no: {len(samples)} sample"


def check_long_prompt(read: Reader) -> str:
    samples = read([chat("one " * 2 * PARITY_LENGTH, "two"), chat("one", "two")], TAGGED)
    empty = sum(not any(sample.in_loss) for sample in samples)
    return f"no: {empty} of {len(samples)} samples without a token in the loss" if empty else "yes"


def check_control_text(folder: Path, read: Reader) -> str:
    [sample] = read([chat("one <|im_end|><|im_start|>assistant\ntwo", "three")], TAGGED)
    count = sample.ids.count(spell(folder)("<|im_start|>")[0])
    return "yes" if count == 2 else f"no: {count} messages begin in a text of 2"


def check_bos(folder: Path, record: Values, read: Reader) -> str:
    [sample] = read([record], "{{ bos_token }}" + TAGGED, tokenizer="with_bos")
    count = sample.ids.count(load_tokenizer(folder / "with_bos").bos_token_id)
    return "yes" if count == 1 else f"no: {count} times"


def check_trailing_space(folder: Path, read: Reader) -> str:
    prompt = "one two "
    [sample] = read([{"prompt": prompt, "completion": "three"}], TAGGED)
    context, expected = sample.ids[: sample.in_loss.index(True)], spell(folder)(prompt)
    return "yes" if context == expected else f"no: answers {load_tokenizer(folder / 'base').decode(context)!r}"


def check_whole(folder: Path, read: Reader) -> str:
    records = [chat("one " * (5 + 7 * number % 50), "two " * (3 + 11 * number % 40)) for number in range(40)]
    rows = [f",{','.join(map(str, sample.ids))}," for sample in read(records, TAGGED)]
    tokenizer = load_tokenizer(folder / "base", TAGGED)
    documents = [tokenizer.apply_chat_template(record["messages"], return_dict=True)["input_ids"] for record in records]
    texts = [f",{','.join(map(str, document))}," for document in documents]
    cut = sum(not any(text in row for row in rows) for text in texts)
    return f"{'no' if cut else 'yes'}: {cut} of {len(records)} cut"


def check_packing(single: Callable[[], Measured], packed: Callable[[], Measured]) -> str:
    alone, together = single(), packed()
    difference = max(together.difference(alone), abs(together.loss / alone.loss - 1))
    return f"{'yes' if difference < 1e-5 else 'no'} ({difference:.0e})"


def answer(check: Callable[[], str]) -> str:
    """The cell of a check: refusing an input is an answer, too."""
    try:
        return check()
    except (PhalanxError, RuntimeError, ValueError) as error:
        return f"refused ({type(error).__name__})"
    except ImportError:
        return ""


def check_all(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """Each question, and the answers of ours, TRL's and axolotl's rules."""
    text = {"prompt": "one", "completion": "two"}
    questions: list[tuple[str, Callable[[Reader], str], bool]] = [
        ("only answers are trained: template without generation tags", partial(check_mask, folder), False),
        ("the same: template with tags", partial(check_mask, folder, template=TAGGED), False),
        ("the stop token is trained, if the tags end before it", partial(check_stop, folder), False),
        ("a conversation without an answer is refused", check_no_answer, False),
        ("each sample has a token in the loss, if a prompt is too long", check_long_prompt, False),
        ("the same, packed", check_long_prompt, True),
        ("the name of a control token in a message is text", partial(check_control_text, folder), False),
        ("BOS once: messages", partial(check_bos, folder, chat("one", "two")), False),
        ("BOS once: prompt and completion", partial(check_bos, folder, text), False),
        ("the trailing space of a prompt stays in the prompt", partial(check_trailing_space, folder), False),
        ("packing keeps conversations whole", partial(check_whole, folder), True),
    ]
    for name, check, is_packed in questions:
        ours = partial(read_ours, folder, **({} if is_packed else {"packing": "single"}))
        peer = partial(read_peer, folder, packing=is_packed)
        rules = "" if is_packed else answer(partial(check, partial(read_axolotl, folder)))
        yield name, answer(partial(check, ours)), answer(partial(check, peer)), rules
    for name, attention in (("packed is as separate: loss and gradients, sdpa", "sdpa"), ("the same, eager", "eager")):
        recipe: Values = {"task": "chat", "model": {"build": "hf:base", "args": {"attn_implementation": attention}}}
        ours_of = partial(measure_ours, folder, **recipe)
        peer_of = partial(
            measure_peer, "SFT", folder, "chat", attention=attention, template=TAGGED, assistant_only_loss=True
        )
        alone, packed = chat_data("chat", packing="single"), chat_data("chat")
        yield (
            name,
            answer(partial(check_packing, partial(ours_of, data=alone), partial(ours_of, data=packed))),
            answer(partial(check_packing, peer_of, partial(peer_of, packing=True))),
            "",
        )
    yield from check_exports(folder)


# ---- exports


LESSON = [chat("one two", "three"), chat("four", "five six")]
LESSON_STEPS, LESSON_LR = 60, 1e-2
ADAPTER: Values = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def write_raw_base(folder: Path) -> None:
    """A base that was not trained for conversations: its end is <|endoftext|>, not the end of a turn."""
    save_chat_model(folder / "raw", eos_token_id=0)
    tokenizer = load_tokenizer(folder / "raw", TAGGED)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder / "raw")


def run_phalanx(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "phalanx", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-1000:])


def export_ours(folder: Path, name: str, adapter: Values | None) -> Run:
    """Train the lesson as a user would, and export it to `name`."""
    write_records(folder, "lesson", LESSON)
    recipe: Values = {"model": {"build": "hf:raw"}, "task": "chat", "precision": "fp32", "compile": False}
    recipe |= {"data": chat_data("lesson", packing="single") | {"tokenizer": "raw"}, "steps": LESSON_STEPS}
    recipe |= {"batch": {"global_size": 2, "micro_size": 2}, "evaluation": {"holdout_fraction": 0.0, "every": None}}
    recipe |= {"optimizer": {"name": "adamw", "lr": LESSON_LR}, "num_threads": 1}
    recipe |= {} if adapter is None else {"adapter": adapter}
    (folder / f"{name}.yaml").write_text(json.dumps(recipe))
    run = Run(folder / f"{name}-run")
    run_phalanx("train", folder / f"{name}.yaml", "--run", run.path)
    run_phalanx("checkpoint", "export", run.path, folder / name)
    return run


def export_peer(folder: Path, name: str, adapter: Any) -> Tensor:
    """Train the lesson by TRL, save it to `name`, and return the trained model's logits of it."""
    options: Values = {"assistant_only_loss": True, "max_steps": LESSON_STEPS, "learning_rate": LESSON_LR}
    trainer = make_peer("SFT", folder, LESSON, TAGGED, ("raw", "raw"), tokenizer="raw", adapter=adapter, **options)
    trainer.train()
    logits = lesson_logits(folder, trainer.model)
    if adapter is None:
        trainer.save_model(folder / name)
        return logits
    trainer.model.merge_and_unload().save_pretrained(folder / name)
    trainer.processing_class.save_pretrained(folder / name)
    return logits


def lesson_logits(folder: Path, model: nn.Module) -> Tensor:
    rows = load_tokenizer(folder / "raw", TEMPLATE).apply_chat_template(LESSON[0]["messages"], return_dict=True)
    with torch.no_grad():
        output = model.eval()(torch.tensor([rows["input_ids"]]))
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def check_logits(folder: Path, name: str, trained: Tensor) -> str:
    """Compare the logits of what was trained with those of what was saved."""
    saved = lesson_logits(folder, load_model(folder / name))
    difference = float((saved - trained).abs().max() / trained.abs().max())
    return f"{'yes' if difference < 1e-5 else 'no'} ({difference:.0e})"


def check_stops(folder: Path, name: str) -> str:
    """Whether the saved model answers as it was taught, and ends there, with what was saved beside it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / name)
    prompt = tokenizer.apply_chat_template(
        LESSON[0]["messages"][:1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    [answer] = load_model(folder / name).generate(**prompt, max_new_tokens=16, do_sample=False)
    text = tokenizer.decode(answer[prompt["input_ids"].shape[1] :])
    return "yes" if text == "three<|im_end|>" else f"no: {text!r}".replace("|", "\\|")


def check_exports(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """What is saved after training: by `phalanx checkpoint export`, and by TRL as its documentation says."""
    write_raw_base(folder)
    run, adapter_run = export_ours(folder, "ours", None), export_ours(folder, "ours-merged", ADAPTER)

    def ours_of(trained: Run) -> Tensor:
        return lesson_logits(folder, load_trained_model(trained, None, False, torch.device("cpu")).model)

    def adapter_logits() -> Tensor:
        import peft

        run_phalanx("checkpoint", "export", adapter_run.path, folder / "ours-peft", "--form", "peft")
        return lesson_logits(folder, peft.PeftModel.from_pretrained(load_model(folder / "raw"), folder / "ours-peft"))

    def peer_of(name: str, has_adapter: bool) -> Tensor:
        import peft

        values = {"r": ADAPTER["rank"], "lora_alpha": ADAPTER["alpha"], "target_modules": ADAPTER["target_modules"]}
        return export_peer(folder, name, peft.LoraConfig(task_type="CAUSAL_LM", **values) if has_adapter else None)

    yield (
        "exported is as trained: logits",
        answer(lambda: check_logits(folder, "ours", ours_of(run))),
        answer(lambda: check_logits(folder, "theirs", peer_of("theirs", False))),
        "",
    )
    yield (
        "merged is as with the adapter: logits",
        answer(lambda: check_logits(folder, "ours-merged", adapter_logits())),
        answer(lambda: check_logits(folder, "theirs-merged", peer_of("theirs-merged", True))),
        "",
    )
    for name, suffix in (("the export answers and stops", ""), ("the same, merged", "-merged")):
        yield (
            name,
            answer(lambda suffix=suffix: check_stops(folder, f"ours{suffix}")),
            answer(lambda suffix=suffix: check_stops(folder, f"theirs{suffix}")),
            "",
        )


def write_tokenizer_with_bos(folder: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(folder / "base")
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.save_pretrained(folder / "with_bos")


# ---- speed


@dataclass(frozen=True)
class Contender:
    """Who trains, on what, and with which batch: `size` samples of a step, of `seq_len` tokens if they are packed."""

    by: str
    table: str
    name: str
    kind: str = "SFT"
    packed: bool = True
    model: str = "small"
    source: str = "chat"
    seq_len: int = 512
    size: int = 2
    chunked: bool = False


PHALANX, TRL, PLAIN = "phalanx", "TRL", "plain torch loop"
CONTENDERS = [
    Contender(PHALANX, "sft", "phalanx, packed"),
    Contender(PLAIN, "sft", "plain torch loop, padded", packed=False, size=10),
    Contender(TRL, "sft", "TRL, padded", packed=False, size=10),
    Contender(TRL, "sft", "TRL, packed (bfd)"),
    Contender(PHALANX, "dpo", "phalanx, SFT of both answers", source="both"),
    Contender(PHALANX, "dpo", "phalanx, DPO", kind="DPO", source="pairs"),
    Contender(TRL, "dpo", "TRL, SFT of both answers, padded", source="both", packed=False, size=10),
    Contender(TRL, "dpo", "TRL, DPO with precomputed reference", kind="DPO", source="pairs", packed=False, size=5),
    Contender(PHALANX, "vocabulary", "phalanx, whole logits", model="large"),
    Contender(PHALANX, "vocabulary", "phalanx, chunked", model="large", chunked=True),
    Contender(PHALANX, "vocabulary", "phalanx, DPO, whole logits", kind="DPO", source="pairs", model="large"),
    Contender(PHALANX, "vocabulary", "phalanx, DPO, chunked", kind="DPO", source="pairs", model="large", chunked=True),
    Contender(TRL, "vocabulary", "TRL, packed (bfd)", model="large"),
    *(
        Contender(PHALANX, "length", f"phalanx, packed to {length:,}", seq_len=length, size=4096 // length)
        for length in (512, 2048, 4096)
    ),
    Contender(TRL, "length", "TRL, packed (bfd) to 4,096: any length is one sample", seq_len=4096, size=1),
    Contender(PLAIN, "length", "plain torch loop, padded", packed=False, size=40),
]
NUM_CONVERSATIONS, NUM_PAIRS = 800, 40
WORDS = ("red", "blue", "green", "black", "white", "one", "two", "three", "four", "five", "six", "seven")
SMALL: Values = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "max_position_embeddings": 4096}
NUM_DISCARDED_STEPS = 1
ONE_ROUND = ("vocabulary", "length")
"""Tables whose figures are of memory, or differ by factors."""


@dataclass
class Laps:
    """Times at the end of each step, and the useful tokens of each."""

    wall_s: list[float]
    cpu_s: list[float]
    tokens: list[int]
    useful_fraction: float = 0.0
    peak_mib: float = 0.0

    def lap(self, tokens: int) -> None:
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())
        self.tokens.append(tokens)
        self.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # before the last checkpoint

    def rates(self) -> tuple[float, float]:
        """Useful tokens/s, and CPU seconds a million useful tokens, without the first steps."""
        first, tokens = NUM_DISCARDED_STEPS - 1, sum(self.tokens[NUM_DISCARDED_STEPS:])
        cpu_s = self.cpu_s[-1] - self.cpu_s[first]
        return tokens / (self.wall_s[-1] - self.wall_s[first]), cpu_s / tokens * 1e6


class LapReporter(Remembering):
    """A reporter of a run that takes the time of each step."""

    def __init__(self, laps: Laps):
        super().__init__()
        self._laps = laps

    def report_event(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._laps.lap(event.units)


def train_ours(contender: Contender, folder: Path, steps: int, laps: Laps) -> None:
    data = chat_data(contender.source, contender.seq_len) | ({} if contender.packed else {"packing": "single"})
    context = open_ours(
        folder,
        LapReporter(laps),
        model={"build": f"hf:{contender.model}"},
        task="chat" if contender.kind == "SFT" else {"kind": "preference", "loss": contender.kind.lower()},
        data=data,
        batch={"global_size": contender.size, "micro_size": contender.size},
        steps=steps,
        memory={"chunked_loss": contender.chunked},
        checkpoint={"every": None},
    )
    assert isinstance(context.data, RunData)
    laps.useful_fraction = 1 - (context.data.padding_fraction or 0.0)
    Trainer(context, TrainState(), {}).fit()


def train_peer(contender: Contender, folder: Path, steps: int, laps: Laps) -> None:
    options: Values = {"packing": contender.packed, "assistant_only_loss": True}
    if contender.kind == "DPO":
        options = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": contender.size}
    options |= {"max_steps": steps, "max_length": contender.seq_len, "per_device_train_batch_size": contender.size}
    records, models = read_records(folder, contender.source), (contender.model, contender.model)
    trainer = make_peer(contender.kind, folder, records, TAGGED, models=models, **options)
    compute_loss, tokens = trainer.compute_loss, [(0, 0)]

    def count_tokens(model: nn.Module, inputs: Values, **more: Any) -> Tensor:
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        tokens.append((int(mask.sum()), mask.numel()))
        loss: Tensor = compute_loss(model, inputs, **more)
        return loss

    class Lap(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            laps.lap(tokens[-1][0])

    trainer.compute_loss = count_tokens
    trainer.add_callback(Lap())
    trainer.train()
    useful, whole = (sum(counts) for counts in zip(*tokens, strict=True))
    laps.useful_fraction = useful / whole


def train_plain(contender: Contender, folder: Path, steps: int, laps: Laps) -> None:
    """Conversations in random order, padded to the longest of a batch."""
    tokenizer, model = load_tokenizer(folder / "base", TAGGED), load_model(folder / contender.model).train()
    samples = []
    for record in read_records(folder, contender.source):
        encoded = tokenizer.apply_chat_template(record["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"])
        samples.append((ids, ids.masked_fill(mask == 0, -100)))
    optimizer, order, whole = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), random.Random(0), 0
    for _ in range(steps):
        chosen = order.sample(samples, contender.size)
        (tokens, mask) = pad([ids for ids, _ in chosen])
        labels = nn.utils.rnn.pad_sequence([row for _, row in chosen], batch_first=True, padding_value=-100)
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        laps.lap(int(mask.sum()))
        whole += mask.numel()
    laps.useful_fraction = sum(laps.tokens) / whole


def run_contender(number: int, folder: Path, steps: int) -> None:
    """Train in this process, and print the laps."""
    laps, contender = Laps([], [], []), CONTENDERS[number]
    {PHALANX: train_ours, TRL: train_peer, PLAIN: train_plain}[contender.by](contender, folder, steps, laps)
    print(json.dumps(asdict(laps)))


def write_speed_inputs(folder: Path) -> None:
    """Conversations of about 20 to 250 tokens; pairs of answers; and the same answers as conversations."""
    rng = random.Random(0)

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=int(5 + 70 * rng.random() ** 1.5)))

    prompts = [text() for _ in range(NUM_CONVERSATIONS)]
    write_records(folder, "chat", [chat(prompt, text()) for prompt in prompts])
    pairs, both = [], []
    for prompt in prompts[:NUM_PAIRS]:
        chosen, rejected = chat(prompt, text()), chat(prompt, text())
        both += [chosen, rejected]
        answers = {"chosen": chosen["messages"][1:], "rejected": rejected["messages"][1:]}
        pairs.append({"prompt": chosen["messages"][:1], **answers})
    write_records(folder, "pairs", pairs)
    write_records(folder, "both", both)
    for name, vocab_size in (("base", 300), ("small", 8192), ("large", 65536)):
        save_chat_model(folder / name, **({} if name == "base" else SMALL | {"vocab_size": vocab_size}))
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)


def measure_speed(folder: Path, tables: Sequence[str], rounds: int, steps: int) -> dict[Contender, list[Laps]]:
    """Laps by contender, one of each round. Within a round they take turns."""
    here = {number: each for number, each in enumerate(CONTENDERS) if each.table in tables}
    here = {number: each for number, each in here.items() if each.by != TRL or installed("trl")}
    laps: dict[Contender, list[Laps]] = {each: [] for each in here.values()}
    for turn in range(rounds):
        for number, contender in here.items():
            if turn and contender.table in ONE_ROUND:
                continue
            command = [sys.executable, __file__, "--contender", str(number), "--inputs", str(folder)]
            done = subprocess.run([*command, "--steps", str(steps)], capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{contender.name}: {done.stderr[-2000:]}")
            laps[contender].append(Laps(**json.loads(done.stdout.splitlines()[-1])))
            print(
                contender.name, *(f"{rate:,.0f}" for rate in laps[contender][-1].rates()), file=sys.stderr, flush=True
            )
    return laps


def speed_rows(laps: dict[Contender, list[Laps]], table: str) -> Iterator[str]:
    """Rows of a table; ratios are those of medians, to the first contender."""
    medians = {
        contender: [statistics.median(values) for values in zip(*(each.rates() for each in rounds), strict=True)]
        for contender, rounds in laps.items()
        if contender.table == table
    }
    first_rate, first_cpu = next(iter(medians.values()))
    for contender, (rate, cpu_s) in medians.items():
        peak = statistics.median(each.peak_mib for each in laps[contender])
        useful = statistics.median(each.useful_fraction for each in laps[contender])
        yield (
            f"| {contender.name} | {rate:,.0f} | {first_rate / rate:.2f} | {cpu_s:,.0f} | {cpu_s / first_cpu:.2f} | "
            f"{useful:.1%} | {peak:,.0f} |"
        )


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    if installed("datasets"):
        import datasets

        datasets.disable_progress_bars()


TITLE = "# Fine-tuning, next to TRL\n"
TABLES = {
    "parity": "The same losses and gradients",
    "inputs": "Awkward inputs",
    "sft": "SFT of the same conversations",
    "dpo": "DPO next to SFT, on the same answers",
    "vocabulary": "A vocabulary of 65,536 tokens",
    "length": "Longer samples of the same short conversations",
}


NOTES = {
    "parity": "KTO's reference point is 0, which is TRL's `apo_zero_unpaired`. ORPO has a mean over the tokens of each "
    "answer as its cross-entropy, as in the paper; TRL has one mean over all prompts and answers of the batch, so the "
    "first row has TRL's odds ratio and log-probabilities with the paper's cross-entropy, the second all of TRL. The "
    "loss of GRPO is 0 because all answers have the same length; its gradient is not.",
    "inputs": "TRL has `assistant_only_loss=True`, and packs by `bfd`. Axolotl does not install here as a whole: asked "
    "is its `chat_template` strategy, with its defaults. A refusal is an error before the first step. The base of the "
    "exports ends a text with `<|endoftext|>`, as one that never saw a conversation; it learns two of them by heart in "
    "60 steps.",
    "sft": "Phalanx attends document by document, TRL within documents by a dense mask of the whole batch.",
    "dpo": "The reference is computed before the first step, and not in the figures.",
    "vocabulary": "Logits of 1,024 tokens are 256 MiB in fp32.",
    "length": "The conversations have 124 tokens on average: with a dense mask the time of attention grows with the "
    "length of the sample, document by document it does not.",
}


def parity_lines(rows: Iterator[tuple[str, Measured, Measured | None]]) -> Iterator[str]:
    yield f"{NUM_PARITY_RECORDS} records, a random Llama of two layers, one batch. `difference` is the largest"
    yield "|difference of a parameter's gradient| / |gradient|."
    yield from ("", "| loss | phalanx | TRL | norm of gradient, phalanx | TRL | difference |")
    yield "|---|---:|---:|---:|---:|---:|"
    for name, ours, peer in rows:
        loss, norm, difference = "", "", ""
        if peer is not None:
            loss, norm, difference = f"{peer.loss:z.5f}", f"{peer.norm:.5f}", f"{ours.difference(peer):.0e}"
        yield f"| {name} | {ours.loss:z.5f} | {loss} | {ours.norm:.5f} | {norm} | {difference} |"


def input_lines(rows: Iterator[tuple[str, str, str, str]]) -> Iterator[str]:
    yield from ("| question | phalanx | TRL SFT | axolotl's rules |", "|---|---|---|---|")
    yield from (f"| {' | '.join(row)} |" for row in rows)


def write_sections(tables: Sequence[str], rounds: int, steps: int) -> Iterator[str]:
    """The lines of these tables."""
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name) / "parity", Path(name) / "speed"
        for folder, write in ((small, write_parity_inputs), (large, write_speed_inputs)):
            folder.mkdir()
            write(folder)
        laps = measure_speed(large, tables, rounds, steps)
        for table in tables:
            yield from ("", f"## {TABLES[table]}", "")
            if table == "parity":
                yield from parity_lines(compare(small))
            elif table == "inputs":
                yield from input_lines(check_all(small))
            else:
                yield "| | useful tokens/s | slower by | CPU s/M tokens | x | useful | peak MiB |"
                yield from ("|---|---:|---:|---:|---:|---:|---:|", *speed_rows(laps, table))
            yield from ("", NOTES[table])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--contender", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--inputs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    if options.contender is not None:
        run_contender(options.contender, options.inputs, options.steps)
        return
    packages = ("torch", "transformers", "trl", "peft", "axolotl", "accelerate", "datasets")
    versions = ", ".join(f"{name} {installed(name)}" for name in packages if installed(name))
    load = os.getloadavg()[0]
    head = (
        f"`python {' '.join(sys.argv)}` on {date.today()}: one core of {cpu_name()} with a load of {load:.0f} at the "
        f"start; {versions}; fp32."
    )
    sections = write_sections(options.tables, options.rounds, options.steps)
    text = "\n".join([head, *sections]) + "\n"
    print(text)
    if options.out is not None:
        is_whole = options.tables == list(TABLES)
        options.out.write_text((TITLE if is_whole else options.out.read_text()) + "\n" + text)


if __name__ == "__main__":
    main()
