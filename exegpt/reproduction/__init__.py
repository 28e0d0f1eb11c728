"""The paper's evaluation again, simulated on stock rooflines: one file per table or figure, and what they share."""
