"""What `cuda.py` measures: a GPT trained by several methods in turns, and the codecs."""
