"""Every private name, patch and reference-count trick with torch, gloo and pydantic, and nothing else.

All other rooms import plain functions from the files here. Each says why it is needed, for which versions it was
written (torch 2.11 and 2.13 where nothing else is said), and how a patch is undone. This file imports nothing, so that
rooms without torch may use the files without it.
"""
