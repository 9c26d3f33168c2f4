"""The leading curvature of a language model that is sharded over processes.

Two processes on a CPU, with a tiny random model::

    torchrun --nproc-per-node=2 docs_src/recipes/sharded_spectrum.py

Eight GPUs, a model of ``save_pretrained``, and sequences of tokens ``[N, T]``, saved by
``torch.save``::

    torchrun --nproc-per-node=8 docs_src/recipes/sharded_spectrum.py --model DIR --tokens FILE
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import curvlinops as cl
from curvlinops.integrations.transformers import problem


def main(options: argparse.Namespace) -> None:
    """Compute the largest eigenvalues of the Hessian, and the trace of the GGN."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_float32_matmul_precision("high")  # TF32
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    rank, size = dist.get_rank(), dist.get_world_size()

    # in float32, on the CPU; fully_shard moves one block after the other to its device
    torch.manual_seed(0)
    if options.model is None:
        config = LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model, tokens = LlamaForCausalLM(config), torch.randint(50, (4, 16))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        tokens = torch.load(options.tokens)
    model.eval()  # without dropout
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    # each process has its own sequences, one in a batch; numbers of batches may differ
    loader = [{"input_ids": ids, "labels": ids} for ids in tokens[rank::size].split(1)]
    arguments = problem(model, loader)

    def report(text: str) -> None:
        if rank == 0:
            memory = f", {torch.cuda.max_memory_allocated() / 1e9:.0f} GB" * (device == "cuda")
            print(f"{text} ({time.perf_counter() - start:.0f} s{memory})", flush=True)

    # all processes compute, one prints
    start = time.perf_counter()
    H = cl.HessianLinearOperator(*arguments, process_group=dist.group.WORLD)
    pairs = cl.eigsh(H, k=options.k, which="LA", ncv=max(options.k + 4, 2 * options.k), tol=1e-2)
    report(
        f"largest eigenvalues of the Hessian: {pairs.eigenvalues.tolist()}, residuals "
        f"{pairs.residuals.tolist()}, {pairs.num_products} products"
    )
    G = cl.GGNLinearOperator(*arguments, process_group=dist.group.WORLD)
    trace, error = cl.hutchinson_trace(G, 4, chunk_size=2, return_error=True, seed=0)
    report(f"trace of the GGN: {float(trace):.4g} +- {float(error):.1g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a Llama-like model; default: a tiny one")
    parser.add_argument("--tokens", help="file of a tensor of tokens")
    parser.add_argument("--k", type=int, default=1, help="number of eigenvalues")
    main(parser.parse_args())
