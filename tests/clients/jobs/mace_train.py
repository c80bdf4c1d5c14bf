"""After MACE's run_train.py: a potential's energies and forces by its own step, amsgrad, EMA, DDP.

Runs on GPUs too, under torchrun. Structures are random and differ in their numbers of atoms and edges. Forces are a
gradient of the energy, so training differentiates twice.
"""

from __future__ import annotations

import os

import ase
import numpy as np
import torch
import torch.distributed as dist
from e3nn import o3
from mace import data, modules, tools
from mace.tools import torch_geometric
from mace.tools.train import take_step
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torch_ema import ExponentialMovingAverage

ELEMENTS, CUTOFF, BATCH, EPOCHS, STRUCTURES = [1, 6, 7, 8], 5.0, 5, 3, 20
OUTPUTS = {"forces": True, "virials": False, "stress": False, "dipoles": False}


def structure(seed: int, table: tools.AtomicNumberTable) -> data.AtomicData:
    """A cloud of 20 to 40 atoms with made-up energies and forces."""
    random = np.random.default_rng(seed)
    number = int(random.integers(20, 41))
    atoms = ase.Atoms(random.choice(ELEMENTS, number), positions=random.uniform(0, 10, (number, 3)))
    atoms.info["REF_energy"] = float(random.normal())
    atoms.arrays["REF_forces"] = random.normal(size=(number, 3))
    keys = data.KeySpecification(info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"})
    return data.AtomicData.from_config(data.config_from_atoms(atoms, key_specification=keys), table, CUTOFF)


def main() -> None:
    """Train to the end of some epochs."""
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.set_default_dtype(torch.float32)
    table = tools.AtomicNumberTable(ELEMENTS)
    structures = [structure(seed, table) for seed in range(STRUCTURES * dist.get_world_size())]
    sampler = DistributedSampler(structures, drop_last=True)
    loader = torch_geometric.dataloader.DataLoader(structures, batch_size=BATCH, sampler=sampler, drop_last=True)
    model = modules.ScaleShiftMACE(
        r_max=CUTOFF,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=3,
        interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=modules.interaction_classes["RealAgnosticInteractionBlock"],
        num_interactions=2,
        num_elements=len(ELEMENTS),
        hidden_irreps=o3.Irreps("128x0e + 128x1o"),
        MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=np.zeros(len(ELEMENTS)),
        avg_num_neighbors=12.0,
        atomic_numbers=ELEMENTS,
        correlation=3,
        gate=torch.nn.functional.silu,
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True, weight_decay=5e-7)
    ema = ExponentialMovingAverage(model.parameters(), decay=0.99)
    loss_fn = modules.WeightedEnergyForcesLoss(energy_weight=1.0, forces_weight=100.0).to(device)
    distributed = DistributedDataParallel(model, device_ids=[local_rank], find_unused_parameters=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss, _ = take_step(distributed, loss_fn, batch, optimizer, ema, OUTPUTS, 10.0, device)
            print(f"epoch {epoch}: loss {float(loss):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
