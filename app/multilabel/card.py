"""placeholder"""
def model_card(folder, labels): pass
