"""A program that ends without closing its model, while an exchange is under way; rank 1 ends by an error of its own."""

import os
import time

import torch
import torch.distributed as dist

import evenly


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    synchronized = evenly.synchronize(model, optimizer, every=4, overlap=3, nodes=[[0], [1]])
    for step in range(200):
        if step == 3 and os.environ["RANK"] == "0":
            time.sleep(1.0)  # the exchange of rank 1 is still under way when it fails
        synchronized(torch.ones(2, 300)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 4 and os.environ["RANK"] == "1":
            raise ValueError("an error of the program")


if __name__ == "__main__":
    main()
