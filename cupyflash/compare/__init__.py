"""``cupyflash compare``: standard attention, V1, V2 and V3 side by side on the machine at hand."""
