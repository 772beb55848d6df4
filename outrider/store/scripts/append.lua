-- ARGV: session TTL ms, fence, start, token ids (4 bytes each), classes (1 byte each), kinds (1 byte each, or empty).
local refused = refusal(ARGV[2])
if refused then
  return refused
end
local unfit, length = write_log(tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6])
if unfit then
  return unfit
end
refresh(ARGV[1])
return {'OK', length}
