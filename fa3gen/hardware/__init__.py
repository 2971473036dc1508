"""Hopper as its documents describe it: limits of sm_90a and the peak rates of the chips."""
