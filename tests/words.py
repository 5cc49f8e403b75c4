"""A small world of text for the tests: tokenizers made on the spot and tiny models with every usual head."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import oracles  # noqa: F401  before transformers: makes its import of torchvision work

SENTENCES = [
    "Alice put the cake in the oven",
    "Bob put the letter in the drawer.",
    "To read the letter, Bob opened the drawer",
]
PIECES = [
    "alice",
    "bob",
    "put",
    "the",
    "cake",
    "letter",
    "in",
    "oven",
    "drawer",
    "to",
    "read",
    "open",
    "##ed",
    "##s",
    ".",
    ",",
    "?",
    "who",
    "a",
]


def wordpiece() -> transformers.PreTrainedTokenizerFast:
    """BERT's kind of tokenizer."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {piece: i for i, piece in enumerate([*special, *PIECES])}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def bytelevel(chat: bool = False) -> transformers.PreTrainedTokenizerFast:
    """GPT-2's kind of tokenizer: spaces belong to words, any byte can be written."""
    from tokenizers.trainers import BpeTrainer

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>", "<|im_start|>"],
        show_progress=False,
    )  # fmt: skip
    inner.train_from_iterator(SENTENCES * 20, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    if chat:
        made.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
    return made


def bert(head: str, **config: object) -> torch.nn.Module:
    torch.manual_seed(3)
    made = transformers.BertConfig(
        vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, **config,
    )  # fmt: skip
    return getattr(transformers, f"BertFor{head}")(made).eval()


def llama() -> torch.nn.Module:
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=340, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, max_position_embeddings=128, eos_token_id=0, bos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def t5() -> torch.nn.Module:
    torch.manual_seed(5)
    config = transformers.T5Config(
        vocab_size=24, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=3,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()
