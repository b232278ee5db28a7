"""All uses of private names of torch, gloo and pydantic, and all patches of them.

All other packages import plain functions from the modules here. Each says why it is needed, for which versions it was
written (torch 2.11 and 2.13 unless it says otherwise), and how a patch is undone. This file imports nothing, so that
packages without torch can import the modules that do not need it.
"""
