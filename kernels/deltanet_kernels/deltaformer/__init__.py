"""The corrected values of DeltaFormer: a triangular solve whose matrix is a softmax of keys with keys."""
