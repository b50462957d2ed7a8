"""Native decoding on a CPU: single layers, or whole steps as a program of one native operator."""
