"""Chat formats as their publishers document them, written down twice: as Jinja templates in
`templates/`, and here as plain string formats with the characters that must be trained."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
WORDS = [
    *("what", "is", "two", "plus", "two?", "It's", "four.", "Grüße,", "你好", "🙂"),
    *("{x:", "1}", "def", "f():\n", "and", "return", "12345", "ok"),
]

Span = tuple[int, int]
Message = Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """A chat format; `{}` stands for the content of a message."""

    name: str
    special: tuple[str, ...]
    """Special tokens, the EOS token first."""
    user: str
    opening: str
    """What the generation prompt ends with, after which the assistant writes."""
    closing: str
    """What the assistant writes behind its content."""
    lead: str = ""
    """What the assistant writes before its content."""
    between: str = ""
    """What the template writes behind that."""
    begin: str = ""
    system: str | None = None
    """None: the format has no system turn."""
    system_in_user: bool = False
    """The system's text stands at the beginning of the first user's content."""
    next_role_ends: str = ""
    """The user's role token, where nothing else ends a turn of the assistant."""
    end: str = ""
    """What ends the text, trained, behind the last `between`."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A small byte-level BPE with the format's special tokens; EOS is its padding."""
        bos = {"bos_token": self.special[1]} if "bos_token" in self.template else {}
        return make_tokenizer(self.special, **bos, chat_template=self.template)

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text()

    def expected(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Text of a conversation that the assistant ends, and what is trained of it."""
        text, spans, pending = self.begin, list[Span](), ""
        for i, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if role == "system":
                assert self.system is not None
                if self.system_in_user:
                    pending = self.system.format(content)
                else:
                    text += self.system.format(content)
            elif role == "user":
                text += self.user.format(pending + content)
                pending = ""
            else:
                text += self.opening
                start = len(text)
                text += self.lead + content + self.closing
                if i + 1 < len(messages):
                    end = len(text) + len(self.next_role_ends)
                    text += self.between
                else:
                    text += (self.between if self.end else "") + self.end
                    end = len(text)
                    text += "" if self.end else self.between
                spans.append((start, end))
        return text, spans


@cache
def _trained_bpe() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    return str(backend.to_str())


def make_tokenizer(special: Sequence[str], **settings: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with these special tokens, of which the first is EOS and padding."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_bpe()),
        eos_token=special[0],
        pad_token=special[0],
        **settings,
    )
    tokenizer.add_special_tokens({"extra_special_tokens": list(special)})
    return tokenizer


def conversations(family: Family, n: int) -> list[list[dict[str, str]]]:
    """Generated conversations, some with a system turn, that end with the assistant."""
    rng = random.Random(family.name)

    def said() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 12))).strip()

    made = []
    for _ in range(n):
        messages = []
        if family.system is not None and rng.random() < 0.5:
            messages.append({"role": "system", "content": said()})
        for _ in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": said()})
            messages.append({"role": "assistant", "content": said()})
        made.append(messages)
    return made


CHATML = Family(
    "chatml",
    ("<|im_end|>", "<|im_start|>"),
    user="<|im_start|>user\n{}<|im_end|>\n",
    opening="<|im_start|>assistant\n",
    closing="<|im_end|>",
    between="\n",
    system="<|im_start|>system\n{}<|im_end|>\n",
)
FAMILIES = (
    CHATML,
    Family(
        "llama3",
        ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        user="<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
        closing="<|eot_id|>",
        begin="<|begin_of_text|>",
        system="<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
    ),
    Family(
        "llama2",
        ("</s>", "<s>"),
        user="<s>[INST] {} [/INST]",
        opening="",
        lead=" ",
        closing=" </s>",
        system="<<SYS>>\n{}\n<</SYS>>\n\n",
        system_in_user=True,
    ),
    Family(
        "mistral",
        ("</s>", "<s>", "[INST]", "[/INST]"),
        user="[INST]{}[/INST]",
        opening="",
        closing="</s>",
        begin="<s>",
        system="{}\n\n",
        system_in_user=True,
    ),
    Family(
        "gemma",
        ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        user="<start_of_turn>user\n{}<end_of_turn>\n",
        opening="<start_of_turn>model\n",
        closing="<end_of_turn>",
        between="\n",
        begin="<bos>",
    ),
    Family(
        "phi3",
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        user="<|user|>\n{}<|end|>\n",
        opening="<|assistant|>\n",
        closing="<|end|>",
        between="\n",
        system="<|system|>\n{}<|end|>\n",
        end="<|endoftext|>",
    ),
    Family(
        "deepseek",
        ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        user="<｜User｜>{}",
        opening="<｜Assistant｜>",
        closing="<｜end▁of▁sentence｜>",
        begin="<｜begin▁of▁sentence｜>",
        system="{}",
    ),
    Family(
        "glm4",
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
        user="<|user|>\n{}",
        opening="<|assistant|>\n",
        closing="",
        begin="[gMASK]<sop>",
        system="<|system|>\n{}",
        next_role_ends="<|user|>",
        end="<|endoftext|>",
    ),
    Family(
        "chatml_generation",
        ("<|im_end|>", "<|im_start|>"),
        user="<|im_start|>user\n{}<|im_end|>\n",
        opening="<|im_start|>assistant\n",
        closing="<|im_end|>",
        between="\n",
        system="<|im_start|>system\n{}<|im_end|>\n",
    ),
)
"""Eight families without Qwen3 (which rewrites history, and is tested by itself), and ChatML
once more with generation blocks."""
