"""The paper's theory against real attention: measurements on pretrained models, and the pictures of docs/theory.md.

The formulas themselves are C++ (``include/dspattn/theory.h``) and are printed by ``dspattn theory``; nothing here
repeats them. ``python -m experiments.theory --help`` lists what can be measured and drawn.
"""
