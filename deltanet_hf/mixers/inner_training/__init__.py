"""The rules that train an inner model on the tokens: least squares (`mesa.py`), test-time training, Titans' memory."""
