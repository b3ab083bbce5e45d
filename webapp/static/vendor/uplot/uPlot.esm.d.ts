// Meshboard's declaration for the type checker, not a part of uPlot.
declare const uPlot: any;
export default uPlot;
