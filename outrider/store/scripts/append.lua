-- ARGV: session TTL ms, fence, start, token ids (4 bytes each), classes (1 byte each), kinds (1 byte each, or empty).
local refused = refusal(ARGV[2])
if refused then
  return refused
end
local start, count = tonumber(ARGV[3]), #ARGV[5]
local length = redis.call('STRLEN', KEYS[3])
if start > length then
  return {'GAP', length}
end
-- What is there already must be the same: a repeat after a lost reply. Only the rest is new.
local known = math.min(length - start, count)
if known > 0 then
  local ids = redis.call('GETRANGE', KEYS[2], start * 4, (start + known) * 4 - 1)
  local classes = redis.call('GETRANGE', KEYS[3], start, start + known - 1)
  if ids ~= string.sub(ARGV[4], 1, known * 4) or classes ~= string.sub(ARGV[5], 1, known) then
    return {'CONFLICT', length}
  end
end
if known < count then
  redis.call('APPEND', KEYS[2], string.sub(ARGV[4], known * 4 + 1))
  redis.call('APPEND', KEYS[3], string.sub(ARGV[5], known + 1))
  if ARGV[6] ~= '' then
    redis.call('SETRANGE', KEYS[4], length, string.sub(ARGV[6], known + 1))
  end
end
refresh(ARGV[1])
return {'OK', length + count - known}
