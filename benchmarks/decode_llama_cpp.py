"""llama.cpp as a variant of `benchmarks.decode`, through the wheels of `xllamacpp` and `gguf`."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.timing import Moment, between, now


def write(folder: Path, path: Path, kind: str) -> int:
    """Write transformers' Llama of a folder as a GGUF file whose matrices have the type `kind`,
    such as "Q8_0". Return the bytes of its tensors.

    Token i is written as "ti"; no text is read. llama.cpp rotates neighbours where
    transformers rotates halves, so the rows of queries and keys take another order.
    """
    import gguf
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    held = 0
    for name, x in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            x = neighbours(x, config.head_dim)
        data = x.float().numpy()
        wanted = gguf.GGMLQuantizationType[kind if x.dim() == 2 else "F32"]
        coded = gguf.quants.quantize(data, wanted)
        held += coded.nbytes
        written = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(written, coded, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def neighbours(x: Tensor, size: int) -> Tensor:
    """Put the rows i and i + size / 2 of each head beside each other."""
    return x.view(-1, 2, size // 2, x.shape[1]).transpose(1, 2).reshape(x.shape)


class LlamaCpp:
    """A server of llama.cpp in this process, on a GGUF file of a folder's model."""

    def __init__(self, folder: Path, kind: str) -> None:
        import xllamacpp

        self.held = TemporaryDirectory()
        path = Path(self.held.name) / "model.gguf"
        self.bytes = write(folder, path, kind)
        table = json.loads((folder / "config.json").read_text())
        rows = table["vocab_size"] * table["hidden_size"]
        block, size = {"Q8_0": (32, 34), "Q4_0": (32, 18), "F32": (1, 4)}[kind]
        self.table = rows // block * size
        given = xllamacpp.CommonParams()
        given.model.path = str(path)
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = torch.get_num_threads()
        given.n_ctx, given.n_parallel, given.n_gpu_layers = 256, 1, 0
        given.warmup, given.verbosity = True, -1
        self.server = xllamacpp.Server(given)

    def facts(self) -> dict[str, float]:
        return {"bytes": self.bytes, "read": self.bytes - self.table}

    def ask(self, prompt: list[int], count: int) -> tuple[list[int], list[Moment]]:
        """Return the tokens after a prompt, and the times at which they arrived."""
        tokens: list[int] = []
        times: list[Moment] = []

        def arrived(answer: str) -> bool:
            word = json.loads(answer)["choices"][0]["text"]
            if word:
                times.append(now())
                tokens.append(int(word.removeprefix("t")))
            return False

        wanted = {"prompt": prompt, "n_predict": count, "stream": True, "cache_prompt": False}
        greedy = {"temperature": 0.0, "ignore_eos": True}
        self.server.handle_completions(json.dumps(wanted | greedy), arrived)
        return tokens, times

    def decode(self, path: str, count: int, prompt: int) -> list[Moment]:
        """Return the seconds of each token after the first."""
        _, times = self.ask(list(range(1, prompt + 1)), count)
        return between(times)
